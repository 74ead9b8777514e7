"""The server as the `openai` package sees it, with the embedded model."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
import torch

from gspo.models.load import load_model, load_tokenizer
from tests.serving.support import KEY, Running

QUESTIONS = ["14+76+16=", "5+5=", "99+1+3=", "7+80="]


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def plain() -> Any:
    return load_model("embedded"), load_tokenizer("embedded")


@torch.no_grad()
def generated(plain: Any, text: str, max_new_tokens: int = 40) -> tuple[list[int], list[int]]:
    model, tokenizer = plain
    text = tokenizer.apply_chat_template(ask(text), add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False)[0].tolist()
    size = prompt["input_ids"].shape[1]
    return out[:size], out[size:]


def test_greedy_answers_are_those_of_transformers(server: Running, plain: Any) -> None:
    client = server.client()
    for question in QUESTIONS:
        prompt, tokens = generated(plain, question)
        answer: Any = client.chat.completions.create(
            model="embedded",
            messages=ask(question),
            temperature=0,
            max_tokens=40,
            extra_body={"return_token_ids": True},
        )
        choice = answer.choices[0]
        assert choice.token_ids == tokens
        assert answer.prompt_token_ids == prompt
        assert choice.message.content == plain[1].decode(tokens, skip_special_tokens=True)
        assert choice.finish_reason == "stop"
        assert answer.usage.completion_tokens == len(tokens) and answer.usage.prompt_tokens == len(prompt)


def test_a_stream_adds_up_to_the_whole(server: Running) -> None:
    client = server.client()
    options: Any = {"model": "embedded", "messages": ask("14+76+16="), "seed": 3, "max_tokens": 60, "n": 2}
    whole = client.chat.completions.create(**options)
    texts, reasons, usage = ["", ""], {}, None
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage == whole.usage


def test_a_seed_repeats_an_answer_and_choices_differ(server: Running) -> None:
    client = server.client()

    def texts(seed: int | None) -> list[Any]:
        answer = client.chat.completions.create(
            model="embedded", messages=ask("1+1="), n=4, seed=seed, temperature=2.0, max_tokens=30
        )
        return [choice.message.content for choice in answer.choices]

    assert texts(5) == texts(5)
    assert len(set(texts(5))) == 4
    assert texts(5) != texts(6)
    assert texts(None) != texts(None)


def test_log_probs_are_those_of_the_model(server: Running, plain: Any) -> None:
    model, tokenizer = plain
    prompt, tokens = generated(plain, QUESTIONS[0])
    answer = server.client().chat.completions.create(
        model="embedded", messages=ask(QUESTIONS[0]), temperature=0, max_tokens=40, logprobs=True, top_logprobs=5
    )
    log_probs = answer.choices[0].logprobs
    assert log_probs is not None and log_probs.content is not None
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    wanted = logits.log_softmax(-1)
    assert [each.token for each in log_probs.content] == [tokenizer.decode([token]) for token in tokens]
    for row, each, token in zip(wanted, log_probs.content, tokens):
        assert each.logprob == pytest.approx(row[token].item(), abs=1e-4)
        best = row.topk(5)
        assert [top.token for top in each.top_logprobs] == [tokenizer.decode([int(i)]) for i in best.indices]
        assert [top.logprob for top in each.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_streamed_log_probs_are_the_whole_ones(server: Running) -> None:
    options: Any = {"model": "embedded", "prompt": "14+76=", "seed": 1, "max_tokens": 50, "logprobs": 3}
    whole: Any = server.client().completions.create(**options).choices[0].logprobs
    tokens, values, tops, offsets = [], [], [], []
    for chunk in server.client().completions.create(**options, stream=True):
        part: Any = chunk.choices[0].logprobs
        tokens += part.tokens
        values += part.token_logprobs
        tops += part.top_logprobs or []
        offsets += part.text_offset
    assert (tokens, values, tops, offsets) == (
        whole.tokens,
        whole.token_logprobs,
        whole.top_logprobs,
        whole.text_offset,
    )


def test_a_stop_text_ends_the_answer_before_it(server: Running, plain: Any) -> None:
    client = server.client()
    options: Any = {"model": "embedded", "prompt": "14+76+16=", "temperature": 0, "max_tokens": 40}
    whole = client.completions.create(**options).choices[0].text
    middle = whole[3:5]
    for stream in (False, True):
        if stream:
            parts = [chunk.choices[0] for chunk in client.completions.create(**options, stop=middle, stream=True)]
            text, reason = "".join(part.text for part in parts), parts[-1].finish_reason
        else:
            choice: Any = client.completions.create(
                **options, stop=[middle, "never"], extra_body={"return_token_ids": True}
            ).choices[0]
            text, reason = choice.text, choice.finish_reason
            written = plain[1].decode(choice.token_ids)
            assert written.endswith(middle) and written.startswith(text)
        assert text == whole[: whole.index(middle)]
        assert reason == "stop"
    kept: Any = client.completions.create(**options, stop=middle, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == whole[: whole.index(middle)] + middle


def test_completions_of_texts_and_of_tokens(server: Running, plain: Any) -> None:
    client, tokenizer = server.client(), plain[1]
    options: Any = {"model": "embedded", "temperature": 0, "max_tokens": 8, "n": 2}
    options["extra_body"] = {"return_token_ids": True}
    texts: Any = client.completions.create(prompt=["1+1=", "22+3="], **options)
    tokens = client.completions.create(prompt=[tokenizer(t)["input_ids"] for t in ("1+1=", "22+3=")], **options)
    assert [c.index for c in texts.choices] == [0, 1, 2, 3]
    assert [c.text for c in texts.choices] == [c.text for c in tokens.choices]
    assert texts.choices[0].text == texts.choices[1].text != texts.choices[2].text
    asked = [tokenizer(text)["input_ids"] for text in ("1+1=", "1+1=", "22+3=", "22+3=")]
    assert [choice.prompt_token_ids for choice in texts.choices] == asked


def test_tokens_in_tokens_out(server: Running, plain: Any) -> None:
    prompt, tokens = generated(plain, QUESTIONS[1])
    raw = server.client()._client
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"token_ids": prompt, "sampling_params": {"temperature": 0, "max_tokens": 40, "logprobs": 1}}
    answer = raw.post(
        f"{server.url}/inference/v1/generate", json={**body, "request_id": "mine"}, headers=headers
    ).json()
    assert answer["request_id"] == "mine"
    assert answer["choices"][0]["token_ids"] == tokens
    content = answer["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in content] == [f"token_id:{token}" for token in tokens]
    assert all(each["logprob"] == pytest.approx(each["top_logprobs"][0]["logprob"], abs=1e-5) for each in content)


def test_many_clients_get_what_each_would_get_alone(server: Running) -> None:
    """More clients than slots, with different lengths, temperatures and seeds, some of them streaming."""

    async def one(client: Any, number: int) -> str:
        options: Any = {
            "model": "embedded",
            "messages": ask(f"{number}+{number % 7}="),
            "seed": number,
            "temperature": (0.0, 0.7, 1.3)[number % 3],
            "max_tokens": 10 + number % 40,
        }
        if number % 4:
            return (await client.chat.completions.create(**options)).choices[0].message.content
        stream = await client.chat.completions.create(**options, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def alone() -> list[str]:
        async with server.async_client() as client:
            return [await one(client, number) for number in range(0, 64, 5)]

    async def together() -> list[str]:
        async with server.async_client() as client:
            return await asyncio.gather(*(one(client, number) for number in range(64)))

    assert asyncio.run(together())[::5] == asyncio.run(alone())


def test_the_list_of_models(server: Running) -> None:
    (model,) = server.client().models.list().data
    assert model.id == "embedded"


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (openai.NotFoundError, {"model": "gpt-9"}, "gpt-9"),
        (openai.BadRequestError, {"max_tokens": 10_000}, "256 tokens"),
        (openai.BadRequestError, {"messages": ask("1+" * 200)}, "256 tokens"),
        (openai.BadRequestError, {"temperature": -1}, "temperature"),
        (openai.BadRequestError, {"top_p": 0}, "top_p"),
        (openai.BadRequestError, {"n": 0}, "n=0"),
        (openai.BadRequestError, {"stop": [""]}, "stop"),
        (openai.BadRequestError, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (openai.BadRequestError, {"presence_penalty": 1.0}, "presence_penalty"),
        (openai.BadRequestError, {"extra_body": {"temprature": 1}}, "temprature"),
        (openai.BadRequestError, {"messages": []}, "messages"),
        (openai.BadRequestError, {"messages": [{"role": "tool", "content": "3"}]}, "chat template"),
        (openai.BadRequestError, {"messages": [{"role": "king", "content": "3"}]}, "role"),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
    ],
)
def test_what_is_refused_and_why(server: Running, kind: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(kind) as refused:
        server.client().chat.completions.create(**{"model": "embedded", "messages": ask("1+1="), **options})
    assert says in str(refused.value)


def test_a_wrong_key_is_refused(server: Running) -> None:
    for key in ("wrong", "a-key-of-a-test2"):
        with pytest.raises(openai.AuthenticationError):
            server.client(api_key=key).models.list()
    for header in ("", "Bearer", "Basic a-key-of-a-test", "Bearer clé"):
        answer = server.client()._client.get(f"{server.url}/v1/models", headers={"Authorization": header.encode()})
        assert answer.status_code == 401
        assert KEY not in answer.text
