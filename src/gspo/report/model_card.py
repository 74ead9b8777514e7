"""The model card of an exported folder, `README.md`: the run card, and how to load the model."""

from __future__ import annotations

from gspo.report.run_card import run_card
from gspo.runs.run import Run

LOAD = """## How to load

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

`gspo serve {name}` serves it with OpenAI's API, `gspo chat {name}` talks to it in the terminal.
"""


LOAD_REWARD_MODEL = """## How to load

```python
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

`gspo train reward_model.enable=true reward_model.path={name}` trains a policy with its scores.
"""


def model_card(run: Run, name: str, step: int | None = None) -> str:
    """Markdown with the front matter that model hubs read. `name` is where the model will be loaded from."""
    card = run_card(run)
    which = "" if step is None else f"\nThese weights are from step {step} of {run.name}.\n"
    head, title, rest = card.partition("\n## ")
    load = LOAD_REWARD_MODEL if run.is_reward_model else LOAD
    return f"{head.rstrip()}\n{which}\n{load.format(name=name.replace('`', ''))}{title}{rest}"
