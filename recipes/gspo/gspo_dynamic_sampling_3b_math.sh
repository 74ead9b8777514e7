#!/usr/bin/env bash
# GSPO with dynamic sampling, a 3B model on GSM8K. Settings by environment, everything else as key=value arguments.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

model_path=${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}
train_files=${TRAIN_FILES:-gsm8k}
test_files=${TEST_FILES:-$train_files}

n_resp_per_prompt=${N_RESP_PER_PROMPT:-16}
train_batch_size=${TRAIN_BATCH_SIZE:-128}
gen_batch_size=${GEN_BATCH_SIZE:-$((2 * train_batch_size))}
ppo_mini_batch_size=${PPO_MINI_BATCH_SIZE:-$((train_batch_size / 4))}
max_num_gen_batches=${MAX_NUM_GEN_BATCHES:-5}
clip_ratio_low=${CLIP_RATIO_LOW:-0.0003}
clip_ratio_high=${CLIP_RATIO_HIGH:-0.0004}
rollout_mode=${ROLLOUT_MODE:-sync}

exec "${PYTHON:-python3}" "$here/main_gspo_dynamic.py" \
    algorithm.filter_groups.enable=true \
    algorithm.filter_groups.metric=seq_reward \
    algorithm.filter_groups.max_num_gen_batches="$max_num_gen_batches" \
    data.train_files="$train_files" \
    data.val_files="$test_files" \
    data.train_batch_size="$train_batch_size" \
    data.gen_batch_size="$gen_batch_size" \
    actor_rollout_ref.model.path="$model_path" \
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
    actor_rollout_ref.actor.clip_ratio_low="$clip_ratio_low" \
    actor_rollout_ref.actor.clip_ratio_high="$clip_ratio_high" \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.actor.ppo_mini_batch_size="$ppo_mini_batch_size" \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.rollout.n="$n_resp_per_prompt" \
    actor_rollout_ref.rollout.mode="$rollout_mode" \
    "$@"
