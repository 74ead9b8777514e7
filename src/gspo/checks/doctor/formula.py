"""The objective of a config written as a formula, with its numbers."""

from __future__ import annotations

from gspo.config import TrainerConfig, resolved_loss

RATIOS = {
    "token": "r_it = π_θ(y_it) / π_old(y_it)",
    "sequence": "s_i = exp( (1/|y_i|) Σ_t log π_θ(y_it)/π_old(y_it) )",
    "sequence_token": "s_it = s_i in value, with the gradient of π_θ(y_it) alone",
}
SUMS = {
    "token-mean": "(1/Σ_i|y_i|) Σ_i Σ_t",
    "seq-mean-token-mean": "(1/N) Σ_i (1/|y_i|) Σ_t",
    "seq-mean-token-sum": "(1/N) Σ_i Σ_t",
    "seq-mean-token-sum-norm": "(1/(N·{length})) Σ_i Σ_t",
    "token-sum": "Σ_i Σ_t",
}
ADVANTAGES = {
    "grpo": "A_i = (R_i - mean of the group) / (std of the group + 1e-6)",
    "dr_grpo": "A_i = R_i - mean of the group",
    "grpo_passk": "A_best = best - second best of the group, 0 for all others",
    "gpg": "A_i = (R_i - mean of the group) · responses / responses with a reward",
    "rloo": "A_i = R_i - mean of the others in the group",
    "opo": "A_i = R_i - Σ_j |y_j| R_j / Σ_j |y_j|",
    "reinforce_plus_plus": "A_it = discounted reward to go (γ = {gamma:g}), whitened over the batch",
    "reinforce_plus_plus_baseline": "A_i = R_i - mean of the group, whitened over the batch",
    "remax": "A_i = R_i - reward of the greedy response",
    "gae": "A_it = Σ_k (γλ)^k δ_(t+k), γ = {gamma:g}, λ = {lam:g}, whitened over the batch",
}


def formula_lines(config: TrainerConfig) -> list[str]:
    """What is minimised, line by line: the loss, the ratio, the advantages and further terms."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    objective = resolved_loss(actor)
    ratio = {"sequence": "s_i", "sequence_token": "s_it"}.get(objective.level, "r_it")
    advantage = "A_it" if algorithm.adv_estimator in ("gae", "reinforce_plus_plus") else "A_i"
    length = actor.loss_scale_factor or config.data.max_response_length
    weight = "w_it · " if actor.use_decoupled_loss else ""
    summed = SUMS.get(objective.aggregation, "Σ_i Σ_t").format(length=length)
    lines = [f"L = {summed} {weight}{_surrogate(objective, ratio, advantage, actor)}", RATIOS[objective.level]]
    estimator = algorithm.adv_estimator
    if estimator == "grpo" and not algorithm.norm_adv_by_std_in_grpo:
        estimator = "dr_grpo"
    form = ADVANTAGES.get(estimator, f"A: as {estimator} computes it")
    lines.append(form.format(gamma=algorithm.gamma, lam=algorithm.lam))
    if actor.use_decoupled_loss:
        limit = actor.behav_imp_weight_cap
        cap = "uncapped" if limit is None else f"{actor.behav_imp_weight_mode} at {limit:g}"
        lines.append(f"w_it = π_old(y_it) / μ(y_it), {cap}")
    if algorithm.use_kl_in_reward:
        c = algorithm.kl_ctrl
        lines.append(f"R_i = score - {c.kl_coef:g} · KL(π_θ‖π_ref) by {algorithm.kl_penalty} ({c.type})")
    if actor.use_kl_loss:
        lines.append(f"L += {actor.kl_loss_coef:g} · KL(π_θ‖π_ref) by {actor.kl_loss_type}")
    if actor.entropy_coeff:
        lines.append(f"L -= {actor.entropy_coeff:g} · entropy")
    if actor.clip_target is not None and objective.clips:
        low, high = actor.clip_target_bounds
        factors = f"by factors from {low:g} to {high:g}"
        lines.append(f"ε is adjusted, {factors}, to clip {actor.clip_target:g} of the sequences")
    return lines


def _surrogate(objective, ratio: str, advantage: str, actor) -> str:
    low, high = objective.clip
    band = f"clip({ratio}, 1 - {low:g}, 1 + {high:g})"
    mode = objective.loss_mode
    if mode == "cispo":
        return f"-sg({band}) {advantage} log π_θ(y_it)"
    if mode == "sapo":
        taus = f"τ = {actor.policy_loss.tau_pos:g} for A > 0, {actor.policy_loss.tau_neg:g} for A < 0"
        return f"-{advantage} · σ(τ({ratio} - 1)) · 4/τ, {taus}"
    if mode == "geo_mean":
        return f"-{advantage} · exp( (1/|y_i|) Σ_t clip(log r_it, -{low:g}, {high:g}) )"
    loss = actor.policy_loss
    if mode == "gpg":
        return f"-{advantage} log π_θ(y_it)"
    if mode == "kl_cov":
        chosen = f"the {loss.kl_cov_ratio:g} of the tokens with the greatest covariance"
        return f"-{ratio} {advantage}, + {loss.ppo_kl_coef:g} |log {ratio}| for {chosen}"
    text = f"-min( {ratio} {advantage}, {band} {advantage} )"
    if mode == "clip_cov":
        between = f"with a covariance of {loss.clip_cov_lb:g} to {loss.clip_cov_ub:g}"
        return f"{text}, without {loss.clip_cov_ratio:g} of the tokens, {between}"
    if mode in ("vanilla", "dapo") and actor.clip_ratio_c is not None:
        text += f", at most {actor.clip_ratio_c:g}|A| where A < 0"
    return text
