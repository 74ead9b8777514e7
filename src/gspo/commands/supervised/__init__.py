"""Commands that train on answers: `gspo sft` imitates them, `gspo rm` compares them."""
