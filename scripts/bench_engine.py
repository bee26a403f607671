"""Compare the embedded engine with plain batched `generate` on one model, in one process.

    python scripts/bench_engine.py --model configs/quickstart/model

Both sample at temperature 1 with one torch thread. `generate` gets equal prompts and equal lengths (its best case); the
engine gets a queue of mixed prompt and response lengths with the same mean. Repeats are interleaved, so a change of
the machine's load hits both; the ratio is the median of the ratios within one repeat. On a machine that is not idle,
`--cpu-time` divides by the process's CPU seconds instead of wall time.
"""

import argparse
import asyncio
import random
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from laminar.workers.engines.base import Request, SamplingParams
from laminar.workers.engines.embedded import EmbeddedEngine

ENGINE_TIMEOUT_S = 300.0


CLOCKS = {False: time.perf_counter, True: time.process_time}


def time_generate(model: PreTrainedModel, args: argparse.Namespace) -> float:
    """Tokens per second of one batched `generate` of `concurrency` equal sequences."""
    prompts = torch.randint(0, model.config.vocab_size, (args.concurrency, args.prompt_tokens))
    began = CLOCKS[args.cpu_time]()
    with torch.inference_mode():
        output = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=args.response_tokens,
            min_new_tokens=args.response_tokens if model.generation_config.eos_token_id is not None else None,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )
    assert output.shape[1] == args.prompt_tokens + args.response_tokens
    return args.concurrency * args.response_tokens / (CLOCKS[args.cpu_time]() - began)


def mixed_requests(args: argparse.Namespace, vocab_size: int, repeat: int) -> list[Request]:
    """`concurrency` x `waves` requests whose lengths are uniform in half to one and a half times the mean."""
    rng = random.Random(repeat)
    requests = []
    for key in range(args.concurrency * args.waves):
        num_prompt = max(1, round(args.prompt_tokens * rng.uniform(0.5, 1.5)))
        num_response = max(1, round(args.response_tokens * rng.uniform(0.5, 1.5)))
        prompt = [rng.randrange(vocab_size) for _ in range(num_prompt)]
        requests.append(
            Request(key=key, prompt_tokens=prompt, sampling=SamplingParams(max_tokens=num_response, seed=key))
        )
    return requests


async def time_engine(
    engine: EmbeddedEngine, finished: asyncio.Queue[int], requests: list[Request], args: argparse.Namespace
) -> float:
    """Tokens per second from the first submit to the last finish, the ramp down at the end included."""
    began = CLOCKS[args.cpu_time]()
    for request in requests:
        engine.submit(request)
    for _ in requests:
        await asyncio.wait_for(finished.get(), ENGINE_TIMEOUT_S)
    seconds = CLOCKS[args.cpu_time]() - began
    outputs = engine.drain()
    failed = [output.finish_reason for output in outputs if output.finish_reason != "length"]
    if failed:
        raise SystemExit(f"{len(failed)} requests did not run to their length, the first ended with {failed[0]!r}")
    return sum(len(output.tokens) for output in outputs) / seconds


async def main() -> None:
    """Print both rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of a Hugging Face causal LM")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=24)
    parser.add_argument("--response-tokens", type=int, default=96)
    parser.add_argument("--waves", type=int, default=8, help="requests per engine row and repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true", help="tokens per CPU second instead of per second")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, local_files_only=True).eval()
    engine = EmbeddedEngine(args.model, num_requests_max=args.concurrency)
    finished: asyncio.Queue[int] = asyncio.Queue()
    await engine.start(finished.put_nowait)
    rates = []
    try:
        for repeat in range(args.repeats + 1):
            generate = time_generate(model, args)
            ours = await time_engine(engine, finished, mixed_requests(args, model.config.vocab_size, repeat), args)
            if repeat > 0:  # the first warms up
                rates.append((generate, ours))
                print(_line(f"repeat {repeat}", generate, ours, ours / generate))
    finally:
        await engine.stop()
    generate, ours = (statistics.median(column) for column in zip(*rates, strict=True))
    ratio = statistics.median(ours / generate for generate, ours in rates)
    print(_line("median", generate, ours, ratio))


def _line(name: str, generate: float, ours: float, ratio: float) -> str:
    return f"{name:10} generate {generate:8.0f} tokens/s   engine {ours:8.0f} tokens/s   ratio {ratio:.2f}"


if __name__ == "__main__":
    asyncio.run(main())
