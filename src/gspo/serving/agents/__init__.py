"""Agents in training: programs that talk to the model over the API, one key per rollout.

sampler ── submit, step ──▶ AgentEpisodes ── begins ──▶ AgentRunner: `run(data, base_url, …)` of every rollout
                              │  ▲                          │ HTTP, with the rollout's key
             inner engine ◀───┘  └── requests ── Session ◀──┘ web server
"""
