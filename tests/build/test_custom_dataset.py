"""data.custom_cls: rows come from the user's dataset class, built as verl builds one."""

from __future__ import annotations

import json

import pytest

from gspo.build.data.training_data import load_examples, load_prompts
from gspo.data.rows import DataError
from gspo.models.load import load_tokenizer
from tests.support.small_run import config

CLASS = '''
import json


class Doubled:
    """Every question of the files twice; the messages are in raw_prompt, as in verl's RLHFDataset."""

    def __init__(self, data_files, tokenizer, config, processor=None):
        assert tokenizer.encode("1") and processor is None
        lines = [json.loads(line) for path in data_files for line in open(path)]
        self.rows = [row for row in lines for _ in range(2)]
        self.key = config.prompt_key

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return {
            "raw_prompt": [{"role": "user", "content": row["q"]}],
            "reward_model": {"ground_truth": row["a"]},
            "data_source": "sums",
            "extra_info": {"index": index},
            "answer": str(row["a"]),
        }
'''


def settings(folder, model, *more: str):
    (folder / "own.py").write_text(CLASS)
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({"q": f"{i}+1=", "a": i + 1}) + "\n" for i in range(3)))
    files = [f"data.train_files={data}", "data.val_files=null", "data.num_train_samples=null"]
    own = [f"data.custom_cls.path={folder / 'own.py'}", "data.custom_cls.name=Doubled"]
    return config(folder, model, *files, *own, *more).config


def test_prompts_are_the_items_of_the_class(tmp_path, model):
    prompts = load_prompts(settings(tmp_path, model), load_tokenizer(str(model)), "train")
    assert [p.messages[-1]["content"] for p in prompts] == ["0+1=", "0+1=", "1+1=", "1+1=", "2+1=", "2+1="]
    assert [p.ground_truth for p in prompts] == [1, 1, 2, 2, 3, 3] and {p.data_source for p in prompts} == {"sums"}


def test_the_number_of_samples_and_missing_files_count(tmp_path, model):
    c = settings(tmp_path, model, "data.num_train_samples=3", "data.train_batch_size=2")
    tokenizer = load_tokenizer(str(model))
    assert len(load_prompts(c, tokenizer, "train")) == 3
    assert load_prompts(c, tokenizer, "val") == []


def test_supervised_examples_come_from_the_class_too(tmp_path, model):
    examples, left_out = load_examples(settings(tmp_path, model), load_tokenizer(str(model)), "train")
    assert len(examples) == 6 and left_out == 0


def test_a_class_that_is_not_there_is_named(tmp_path, model):
    c = settings(tmp_path, model, "data.custom_cls.name=Tripled")
    with pytest.raises(DataError, match=r"data\.custom_cls\.name.*'Tripled'.*no such class"):
        load_prompts(c, load_tokenizer(str(model)), "train")
