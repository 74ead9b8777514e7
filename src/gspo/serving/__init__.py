"""What answers clients: an OpenAI-compatible web server over a rollout engine.

    client ── HTTP ──▶ app (event loop) ── open, cancel ──▶ Batcher (thread) ── submit, step ──▶ RolloutEngine
       ◀── JSON, SSE ──      ◀── updates, once per step ──       ◀── written, groups ──

`parameters` checks bodies, `prompts` makes tokens of them, `replies` makes text of tokens, `wire` writes answers.
"""
