"""The embedded engine against transformers itself: equal tokens and log-probs, whatever joins, leaves or moves."""

import asyncio
import contextlib
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen3Config

from laminar.errors import StartError
from laminar.ids import Version
from laminar.workers.engines.base import Output, Request, SamplingParams, WeightsBroken
from laminar.workers.engines.embedded import EmbeddedEngine
from laminar.workers.relay.manifest import Manifest, Snapshot

WAIT_S = 30.0
VOCAB_SIZE = 40
SHAPE = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
DECODER = {
    **SHAPE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "qwen3": Qwen3Config(**DECODER, head_dim=8, tie_word_embeddings=True),
    "llama": LlamaConfig(**DECODER, tie_word_embeddings=False),
    "gpt2": GPT2Config(**SHAPE, n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "mistral_window": MistralConfig(**DECODER, sliding_window=7),
    "qwen3_mixed_window": Qwen3Config(
        **DECODER,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention"],
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of random models, made on demand. Large initial weights make positions and masks matter."""
    made = {}

    def make(name, seed=0):
        if (name, seed) not in made:
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(CONFIGS[name])
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim > 1:
                        parameter.normal_(0, 0.3)
            path = tmp_path_factory.mktemp(f"{name}-{seed}")
            model.save_pretrained(path)
            made[name, seed] = str(path)
        return made[name, seed]

    torch.set_num_threads(1)
    return make


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def request(key, num_prompt, *, prefix=(), **sampling):
    generator = torch.Generator().manual_seed(key + 1000)
    prompt = torch.randint(0, VOCAB_SIZE, (num_prompt,), generator=generator).tolist()
    return Request(
        key=key,
        prompt_tokens=prompt,
        prefix_tokens=list(prefix),
        sampling=SamplingParams(**{"max_tokens": 8, **sampling}),
    )


class Driver:
    """An engine and everything that its drains gave, per key."""

    def __init__(self, engine):
        self.engine = engine
        self.outputs: dict[int, Output] = {}
        self.finished = asyncio.Queue()

    def drain(self):
        for new in self.engine.drain():
            have = self.outputs.setdefault(new.key, Output(key=new.key, tokens=[], logprobs=[]))
            assert have.finish_reason is None, "something followed a finish"
            have.tokens += new.tokens
            have.logprobs += new.logprobs
            have.finish_reason, have.queued_s, have.decode_s = new.finish_reason, new.queued_s, new.decode_s

    async def wait(self, num=1):
        keys = [await asyncio.wait_for(self.finished.get(), WAIT_S) for _ in range(num)]
        self.drain()
        return keys

    async def run(self, requests):
        for one in requests:
            self.outputs.pop(one.key, None)
            self.engine.submit(one)
        await self.wait(len(requests))
        return [self.outputs[one.key] for one in requests]

    async def tokens_of(self, key, num):
        """Wait, by draining, until a running request has `num` tokens."""

        async def poll():
            while key not in self.outputs or len(self.outputs[key].tokens) < num:
                self.drain()
                await asyncio.sleep(0)

        await asyncio.wait_for(poll(), WAIT_S)


@contextlib.asynccontextmanager
async def running(path, **limits):
    engine = EmbeddedEngine(path, **{"num_requests_max": 4, **limits})
    driver = Driver(engine)
    await engine.start(driver.finished.put_nowait)
    try:
        yield driver
    finally:
        await engine.stop()


def forward_shapes(engine):
    """[sequences, tokens] of every forward from now on, in order."""
    shapes = []
    engine._model._model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


def assert_matches_plain_forward(model, requests, outputs, temperature=1.0):
    """Log-probs equal those of one teacher-forced forward over prompt + prefix + response."""
    for one, output in zip(requests, outputs, strict=True):
        assert output.finish_reason in ("stop", "length", "abort")
        given = one.prompt_tokens + one.prefix_tokens
        with torch.inference_mode():
            logits = model(torch.tensor([given + output.tokens])).logits[0, len(given) - 1 : -1]
        expected = (logits / temperature).log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(output.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.logprobs), chosen, atol=1e-4, rtol=0)


def greedy_reference(model, one):
    ids = torch.tensor([one.prompt_tokens + one.prefix_tokens])
    num_new = one.sampling.max_tokens - len(one.prefix_tokens)
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False, pad_token_id=0
        )
    return output[0, ids.shape[1] :].tolist()


def snapshot_of(model, change=lambda tensors: tensors):
    tensors = change({name: parameter.detach() for name, parameter in model.named_parameters()})
    rows = [(n, str(t.dtype).removeprefix("torch."), tuple(t.shape), t.element_size()) for n, t in tensors.items()]
    manifest = Manifest.plan(rows)
    buffer = bytearray(manifest.num_bytes)
    for spec, tensor in zip(manifest.tensors, tensors.values(), strict=True):
        buffer[spec.offset : spec.offset + spec.num_bytes] = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return Snapshot(manifest, memoryview(buffer))


# ---- equality with transformers ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
async def test_greedy_tokens_and_logprobs_equal_transformers_while_requests_join_and_leave(models, name):
    requests = [request(key, 1 + 5 * key % 13, max_tokens=3 + 7 * key % 17, temperature=0.0) for key in range(12)]
    async with running(models(name)) as driver:
        outputs = await driver.run(requests)
    model = load(models(name))
    for one, output in zip(requests, outputs, strict=True):
        assert output.finish_reason == "length"
        assert output.tokens == greedy_reference(model, one)
    assert_matches_plain_forward(model, requests, outputs)


async def test_sampled_logprobs_equal_a_plain_forward_at_that_temperature(models):
    requests = [request(key, 2 + key, temperature=0.7, seed=key, top_p=0.9, top_k=10) for key in range(6)]
    async with running(models("qwen3")) as driver:
        outputs = await driver.run(requests)
    assert_matches_plain_forward(load(models("qwen3")), requests, outputs, temperature=0.7)


async def test_a_request_samples_the_same_alone_and_in_any_company(models):
    requests = [request(key, 3 + key, max_tokens=5 + 6 * (key % 4), seed=key) for key in range(10)]
    async with running(models("qwen3"), num_requests_max=3) as driver:
        crowded = await driver.run(requests)
    async with running(models("qwen3")) as driver:
        alone = [(await driver.run([one]))[0] for one in requests]
    assert [output.tokens for output in crowded] == [output.tokens for output in alone]
    assert len({tuple(output.tokens[:5]) for output in crowded}) > 5


async def test_siblings_share_a_prefill_and_differ_by_seed(models):
    prompt = request(0, 9).prompt_tokens
    siblings = [
        Request(key=key, prompt_tokens=prompt, sampling=SamplingParams(max_tokens=12, seed=key)) for key in range(6)
    ]
    async with running(models("llama"), num_requests_max=8) as driver:
        shapes = forward_shapes(driver.engine)
        outputs = await driver.run([*siblings, request(7, 4)])
        assert (
            sum(rows for rows, tokens in shapes if tokens > 1) <= 3
        )  # the first may be prefilled before the others come
    assert len({tuple(output.tokens) for output in outputs[:6]}) == 6
    assert_matches_plain_forward(load(models("llama")), siblings, outputs[:6])


async def test_generation_goes_on_from_a_prefix_as_if_it_had_never_stopped(models):
    whole = request(0, 5, max_tokens=20, seed=11, temperature=1.2)
    async with running(models("qwen3")) as driver:
        (expected,) = await driver.run([whole])
    for cut in (1, 7, 19):
        rest = request(0, 5, prefix=expected.tokens[:cut], max_tokens=20, seed=11, temperature=1.2)
        async with running(models("qwen3")) as driver:
            _, output = await driver.run([request(5, 11, max_tokens=30), rest])
        assert output.tokens == expected.tokens[cut:]
        assert output.logprobs == pytest.approx(expected.logprobs[cut:], abs=1e-4)


async def test_a_long_prompt_and_a_full_context_end_at_the_context_limit(models):
    one = request(0, 100, max_tokens=1000, temperature=0.0)
    async with running(models("qwen3")) as driver:
        (output,) = await driver.run([one])
        assert driver.engine.context_tokens_max == 128
    assert output.finish_reason == "length"
    assert len(output.tokens) == 28
    assert_matches_plain_forward(load(models("qwen3")), [one], [output])


async def test_many_prompts_beyond_one_prefill_are_all_served(models, monkeypatch):
    monkeypatch.setattr("laminar.workers.engines.embedded.PREFILL_TOKENS_MAX", 32)
    requests = [request(key, 10 + key, max_tokens=4, temperature=0.0) for key in range(8)]
    async with running(models("qwen3"), num_requests_max=8) as driver:
        shapes = forward_shapes(driver.engine)
        outputs = await driver.run(requests)
        assert len(shapes) > 8
        assert all(rows * tokens <= 32 for rows, tokens in shapes if rows > 1)
    assert_matches_plain_forward(load(models("qwen3")), requests, outputs)


async def test_sixteen_bit_models_run_with_logprobs_near_those_of_float32(models):
    requests = [request(key, 4 + key, max_tokens=6) for key in range(3)]
    async with running(models("llama"), dtype="bfloat16") as driver:
        outputs = await driver.run(requests)
    model = AutoModelForCausalLM.from_pretrained(models("llama"), dtype=torch.bfloat16).float()
    for one, output in zip(requests, outputs, strict=True):
        logits = model(torch.tensor([one.prompt_tokens + output.tokens])).logits[0, len(one.prompt_tokens) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(output.tokens)[:, None])[:, 0]
        assert (torch.tensor(output.logprobs) - expected).abs().mean() < 0.1


# ---- ends --------------------------------------------------------------------------------------------------


async def test_a_stop_token_ends_the_response_and_belongs_to_it(models):
    plain = request(0, 4, max_tokens=20, seed=3)
    async with running(models("qwen3")) as driver:
        (expected,) = await driver.run([plain])
        stop = expected.tokens[6]
        first = expected.tokens.index(stop)
        (output,) = await driver.run([request(0, 4, max_tokens=20, seed=3, stop_ids=(stop, 39))])
    assert output.finish_reason == "stop"
    assert output.tokens == expected.tokens[: first + 1]


async def test_abort_keeps_what_was_generated_and_leaves_the_others_alone(models):
    long = request(0, 4, max_tokens=110)
    others = [request(key, 3, max_tokens=60, temperature=0.0) for key in (1, 2)]
    async with running(models("qwen3")) as driver:
        for one in (long, *others):
            driver.engine.submit(one)
        await driver.tokens_of(0, 3)
        driver.engine.abort(0)
        driver.engine.abort(12345)
        await driver.wait(3)
        outputs = driver.outputs
        assert outputs[0].finish_reason == "abort"
        assert 3 <= len(outputs[0].tokens) < 110
        usage = driver.engine.usage()
        assert (usage.num_running, usage.num_waiting, usage.kv_tokens) == (0, 0, 0)
        (same,) = await driver.run([request(9, 4, max_tokens=5)])
        assert same.finish_reason == "length"
    model = load(models("qwen3"))
    assert_matches_plain_forward(model, [long, *others], [outputs[0], outputs[1], outputs[2]])


async def test_a_waiting_request_can_be_aborted_before_it_ever_runs(models):
    async with running(models("qwen3"), num_requests_max=1) as driver:
        driver.engine.submit(request(0, 4, max_tokens=100))
        driver.engine.submit(request(1, 4))
        await driver.tokens_of(0, 1)
        driver.engine.abort(1)
        assert await driver.wait() == [1]
        assert (driver.outputs[1].tokens, driver.outputs[1].finish_reason) == ([], "abort")
        await driver.wait()
        assert driver.outputs[0].finish_reason == "length"


async def test_stop_ends_what_runs_and_waits_and_may_be_called_twice(models):
    engine = EmbeddedEngine(models("qwen3"), num_requests_max=1)
    driver = Driver(engine)
    await engine.start(driver.finished.put_nowait)
    for key in range(2):
        engine.submit(request(key, 4, max_tokens=100))
    await driver.tokens_of(0, 1)
    await engine.stop()
    await engine.stop()
    await driver.wait(2)
    assert [driver.outputs[key].finish_reason for key in range(2)] == ["abort", "abort"]
    with pytest.raises(RuntimeError, match="stopped"):
        engine.submit(request(3, 4))


async def test_drain_gives_each_token_once_in_submission_order_with_times(models):
    async with running(models("qwen3")) as driver:
        for key in (5, 2, 9):
            driver.engine.submit(request(key, 4, max_tokens=30))
        await driver.wait(3)
        assert driver.engine.drain() == []
        assert driver.engine.usage().busy_s > 0
    assert list(driver.outputs) == [5, 2, 9]
    for output in driver.outputs.values():
        assert len(output.tokens) == len(output.logprobs) == 30
        assert output.queued_s >= 0
        assert output.decode_s > 0


# ---- capacity ----------------------------------------------------------------------------------------------


async def test_requests_wait_in_order_while_their_worst_case_does_not_fit(models):
    async with running(models("qwen3"), kv_tokens_max=100) as driver:
        for key in range(3):
            driver.engine.submit(request(key, 10, max_tokens=50))
        # This one would fit beside any other, but may not overtake; it ends before 2, with which it starts.
        driver.engine.submit(request(3, 4, max_tokens=30))
        await driver.tokens_of(0, 1)
        usage = driver.engine.usage()
        assert (usage.num_running, usage.num_waiting) == (1, 3)
        assert 10 < usage.kv_tokens <= 60
        assert await driver.wait(4) == [0, 1, 3, 2]
        assert all(output.finish_reason == "length" for output in driver.outputs.values())


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (request(1, 128), "no room"),
        (request(1, 4, prefix=range(8)), "no room"),
        (request(1, 60, max_tokens=60), "KV tokens"),
        (Request(key=1, prompt_tokens=[], sampling=SamplingParams(max_tokens=1)), "empty prompt"),
        (Request(key=1, prompt_tokens=[VOCAB_SIZE], sampling=SamplingParams(max_tokens=1)), "vocabulary"),
        (Request(key=1, prompt_tokens=[0], prefix_tokens=[-1], sampling=SamplingParams(max_tokens=9)), "vocabulary"),
        (request(1, 4, temperature=-1.0), "temperature"),
        (request(0, 4), "live"),
    ],
)
async def test_a_request_that_can_never_run_is_refused_and_harms_nobody(models, bad, text):
    async with running(models("qwen3"), kv_tokens_max=110) as driver:
        driver.engine.submit(request(0, 4, max_tokens=90))
        with pytest.raises(ValueError, match=text):
            driver.engine.submit(bad)
        await driver.wait()
        assert driver.outputs[0].finish_reason == "length"


# ---- weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt2"])
async def test_new_weights_change_the_outputs_to_those_of_the_new_model(models, name):
    new = load(models(name, seed=1))
    requests = [request(key, 4 + key, temperature=0.0, max_tokens=10) for key in range(3)]
    async with running(models(name)) as driver:
        before = await driver.run(requests)
        await driver.engine.load_weights(Version(1, 0), snapshot_of(new))
        after = await driver.run(requests)
    assert [output.tokens for output in after] == [greedy_reference(new, one) for one in requests]
    assert [output.tokens for output in after] != [output.tokens for output in before]
    assert_matches_plain_forward(new, requests, after)


async def test_weights_are_refused_while_a_request_runs(models):
    snapshot = snapshot_of(load(models("qwen3", seed=1)))
    one = request(0, 4, max_tokens=110, temperature=0.0)
    async with running(models("qwen3")) as driver:
        driver.engine.submit(one)
        with pytest.raises(RuntimeError, match="1 requests"):
            await driver.engine.load_weights(Version(1, 0), snapshot)
        await driver.wait()
    assert_matches_plain_forward(load(models("qwen3")), [one], [driver.outputs[0]])


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: {n: v for n, v in t.items() if n != NORM}, f"lacks {NORM}"),
        (lambda t: {**t, "extra.weight": torch.zeros(3)}, "no parameter extra.weight"),
        (lambda t: {**t, NORM: torch.zeros(31)}, rf"{NORM} has shape \(31,\)"),
        (lambda t: {**t, NORM: t[NORM].bfloat16()}, f"{NORM} is bfloat16"),
    ],
)
async def test_weights_that_do_not_fit_leave_the_old_ones_whole_and_name_the_tensor(models, change, text):
    new = load(models("qwen3", seed=1))
    one = request(0, 4, temperature=0.0)
    async with running(models("qwen3")) as driver:
        with pytest.raises(ValueError, match=text):
            await driver.engine.load_weights(Version(1, 0), snapshot_of(new, change))
        (output,) = await driver.run([one])
    assert_matches_plain_forward(load(models("qwen3")), [one], [output])


async def test_a_version_with_too_few_bytes_leaves_the_old_weights_whole(models):
    whole = snapshot_of(load(models("qwen3", seed=1)))
    one = request(0, 4, temperature=0.0)
    async with running(models("qwen3")) as driver:
        with pytest.raises(ValueError, match="buffer"):
            await driver.engine.load_weights(Version(1, 0), Snapshot(whole.manifest, whole._buffer[:-1000]))
        (output,) = await driver.run([one])
    assert_matches_plain_forward(load(models("qwen3")), [one], [output])


async def test_weights_that_break_half_way_end_the_engine_loudly(models, monkeypatch):
    submitted = threading.Event()

    def fail(parameters, tensors):
        assert submitted.wait(WAIT_S)
        raise RuntimeError("device lost (simulated)")

    monkeypatch.setattr("laminar.workers.engines.weights.copy_weights", fail)
    async with running(models("qwen3")) as driver:
        loading = asyncio.create_task(
            driver.engine.load_weights(Version(1, 0), snapshot_of(load(models("qwen3", seed=1))))
        )
        await asyncio.sleep(0)
        driver.engine.submit(request(0, 4))
        submitted.set()
        with pytest.raises(WeightsBroken, match=r"half-way \(RuntimeError: device lost"):
            await asyncio.wait_for(loading, WAIT_S)
        await driver.wait()
        assert driver.outputs[0].finish_reason.startswith("error: WeightsBroken: the weights broke half-way")
        with pytest.raises(RuntimeError, match="dead"):
            driver.engine.submit(request(1, 4))
        with pytest.raises(RuntimeError, match="dead"):
            await driver.engine.load_weights(Version(2, 0), snapshot_of(load(models("qwen3"))))


async def test_logprobs_of_a_sequence_are_those_of_a_plain_forward_and_wait_for_no_running_request(models):
    tokens = [5, 9, 2, 7, 7, 1, 30]
    plain = load(models("qwen3"))
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([tokens])).logits[0, :-1]
    expected = logits.float().log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    async with running(models("qwen3")) as driver:
        found = await asyncio.wait_for(driver.engine.logprobs(tokens), WAIT_S)
        driver.engine.submit(request(0, 40))
        with pytest.raises(RuntimeError, match="cannot compute log-probs: 1 requests are running"):
            await driver.engine.logprobs(tokens)
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-5, rtol=0)


async def test_a_request_submitted_during_a_load_runs_on_the_new_weights(models):
    new = load(models("qwen3", seed=1))
    one = request(0, 4, temperature=0.0)
    async with running(models("qwen3")) as driver:
        loading = asyncio.create_task(driver.engine.load_weights(Version(1, 0), snapshot_of(new)))
        await asyncio.sleep(0)
        (output,) = await driver.run([one])
        await asyncio.wait_for(loading, WAIT_S)
    assert output.tokens == greedy_reference(new, one)


# ---- faults ------------------------------------------------------------------------------------------------


async def test_a_failing_forward_ends_the_running_requests_with_an_error_and_the_engine_goes_on(models):
    broken = [True]

    def fail(module, args):
        if broken:
            raise RuntimeError("out of memory (simulated)")

    requests = [request(key, 4, temperature=0.0) for key in range(3)]
    async with running(models("qwen3")) as driver:
        handle = next(driver.engine._model._model.children()).register_forward_pre_hook(fail)
        outputs = await driver.run(requests)
        assert {output.finish_reason for output in outputs} == {"error: RuntimeError: out of memory (simulated)"}
        broken.clear()
        handle.remove()
        outputs = await driver.run(requests)
        assert driver.engine.usage().kv_tokens == 0
    assert_matches_plain_forward(load(models("qwen3")), requests, outputs)


async def test_weights_that_are_not_numbers_fail_requests_and_good_weights_heal_the_engine(models):
    good = load(models("qwen3"))
    nan = snapshot_of(good, lambda tensors: {name: torch.full_like(t, float("nan")) for name, t in tensors.items()})
    requests = [request(key, 4 + key, temperature=float(key % 2)) for key in range(4)]
    async with running(models("qwen3")) as driver:
        await driver.run(requests)
        await driver.engine.load_weights(Version(1, 0), nan)
        outputs = await driver.run([request(key, 20 + key, temperature=float(key % 2)) for key in range(4)])
        assert all(output.finish_reason.startswith("error: the model gave logits") for output in outputs)
        assert all(output.tokens == [] for output in outputs)
        await driver.engine.load_weights(Version(2, 0), snapshot_of(good))
        outputs = await driver.run(requests)
    assert_matches_plain_forward(good, requests, outputs)


async def test_an_engine_that_is_not_running_says_so(models):
    engine = EmbeddedEngine(models("qwen3"), num_requests_max=1)
    with pytest.raises(RuntimeError, match="not been started"):
        engine.submit(request(0, 4))
    await engine.stop()


@pytest.mark.parametrize(
    ("limits", "text"),
    [({"dtype": "int3"}, "int3"), ({"context_tokens_max": 129}, "128 positions")],
)
async def test_a_wrong_start_names_the_setting(models, limits, text):
    engine = EmbeddedEngine(models("qwen3"), num_requests_max=1, **limits)
    with pytest.raises(StartError, match=text):
        await engine.start(print)


async def test_a_missing_model_is_a_start_error(tmp_path):
    engine = EmbeddedEngine(str(tmp_path / "nothing"), num_requests_max=1)
    with pytest.raises(StartError, match=r"config\.json"):
        await engine.start(print)
    await engine.stop()


def test_limits_out_of_range_are_refused():
    with pytest.raises(ValueError, match="num_requests_max"):
        EmbeddedEngine("x", num_requests_max=0)
