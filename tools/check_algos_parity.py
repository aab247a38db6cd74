"""Compare algos-gspo-dapo-grpo with the published verl and TRL, and write its tests' fixtures.

The same random inputs go through verl's and TRL's functions, in an environment of their own, and
through ours. Values and gradients must agree to 1e-6 in float64 and to 1e-5 in float32.

    ./run tools/check_algos_parity.py            # build the environment, compare
    ./run tools/check_algos_parity.py --write    # compare, and write the fixtures

The environment is a folder that is kept between runs (``--environment``), 6 GB that take some
minutes to install; neither verl nor TRL is ever a dependency. The fixtures are float64 results,
which the package's tests check ours against without that environment.
"""

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "packages" / "algos-gspo-dapo-grpo" / "tests"
FIXTURES = TESTS / "data" / "parity.json"
VERSIONS = {"verl": "0.9.1", "trl": "1.16.0", "torch": "2.15.0"}
# What importing their formulas needs; nothing of it touches a GPU.
REQUIREMENTS = (
    f"trl=={VERSIONS['trl']}",
    f"torch=={VERSIONS['torch']}",
    *("numpy", "omegaconf", "tensordict", "hydra-core", "codetiming", "pydantic", "torchdata"),
    *("pyarrow", "pandas", "dill", "wandb", "ray", "pylatexenc", "cachetools", "packaging"),
    *("psutil", "orjson"),
)
Case = dict[str, Any]
Settings = dict[str, Any]


def environment(folder: Path) -> Path:
    """Build the environment of the other two unless it is there; the path of its Python."""
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run(["uv", "venv", "--quiet", "--clear", "--python", "3.11", folder], check=True)
        install = ["uv", "pip", "install", "--quiet", "--python", str(python)]
        subprocess.run([*install, "--no-deps", f"verl=={VERSIONS['verl']}"], check=True)
        subprocess.run([*install, *REQUIREMENTS], check=True)
        (folder / "complete").touch()
    return python


def make_inputs() -> dict[str, Any]:
    """Random inputs of six sequences in two groups, padded to seven tokens; one has a tool call."""
    import torch  # noqa: PLC0415  # a module of either environment

    generator = torch.Generator().manual_seed(4)

    def near(logprobs: Any, distance: float) -> Any:  # noqa: ANN401  # tensors of either torch
        noise = torch.randn(6, 7, generator=generator, dtype=torch.float64)
        return (logprobs + distance * noise).clamp(max=-1e-3)

    proximal = -2.0 * torch.rand(6, 7, generator=generator, dtype=torch.float64) - 0.05
    lengths = torch.tensor([7, 3, 5, 6, 1, 4])
    mask = torch.arange(7) < lengths[:, None]
    mask[0, 3] = False
    return {
        "proximal": proximal.tolist(),
        "policy": near(proximal, 0.3).tolist(),
        "rollout": near(proximal, 0.4).tolist(),
        "ref": near(proximal, 0.5).tolist(),
        "mask": mask.tolist(),
        "advantages": [1.1, -0.7, 0.4, -1.3, 0.9, -0.2],
        "rewards": [1.0, 0.25, 0.5, 0.125, 0.75, 0.25],
        "more_rewards": [[1.0, 0.0], [0.0, 1.0], [0.5, 0.0], [0.0, 1.0], [1.0, 0.5], [0.5, 0.0]],
        "greedy_rewards": [0.5, 0.5, 0.25, 0.25, 0.5, 0.25],
        "groups": [0, 0, 1, 1, 0, 1],
        "token_rewards": torch.randn(6, 7, generator=generator, dtype=torch.float64).tolist(),
        "values": torch.randn(6, 7, generator=generator, dtype=torch.float64).tolist(),
    }


class Reference:
    """The other two libraries' functions on the inputs; runs in their environment."""

    def __init__(self, inputs: dict[str, Any], dtype_name: str) -> None:
        """Turn the inputs into tensors of the dtype."""
        import torch  # noqa: PLC0415

        self.torch = torch
        dtype = getattr(torch, dtype_name)
        flags = {"mask", "groups"}
        self.at: Any = SimpleNamespace(
            **{
                name: torch.tensor(value, dtype=None if name in flags else dtype)
                for name, value in inputs.items()
            }
        )
        self.mask = self.at.mask.to(dtype)

    def loss(self, source: str, name: str, function: Callable[[Any], Any]) -> Case:
        """Value and gradient with respect to the policy's log-probabilities."""
        policy = self.at.policy.clone().requires_grad_()
        value = function(policy)
        (gradient,) = self.torch.autograd.grad(value, policy)
        return {
            "source": source,
            "name": name,
            "value": value.item(),
            "gradient": gradient.tolist(),
        }

    def verl(self) -> Iterator[Case]:
        """Everything of verl's that we have too."""
        # By name, since they are no modules of this workspace, whose types are checked.
        core_algos = importlib.import_module("verl.trainer.ppo.core_algos")
        rollout_corr_helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
        actor_config = importlib.import_module("verl.workers.config").ActorConfig

        at, mask = self.at, self.mask
        tokens = at.advantages[:, None].expand(6, 7)

        def actor(**settings: Any) -> Any:  # noqa: ANN401
            fixed = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
            return actor_config(**fixed, **settings)

        def loss(
            name: str,
            mode: str,
            *,
            aggregation: str = "token-mean",
            against: Any = at.proximal,  # noqa: ANN401
            weights: Any = None,  # noqa: ANN401
            policy_loss: Settings | None = None,
            settings: Settings | None = None,
        ) -> Case:
            config = actor(**(settings or {}))
            for key, value in (policy_loss or {}).items():
                object.__setattr__(config.policy_loss, key, value)
            function = core_algos.get_policy_loss_fn(mode)
            return self.loss(
                "verl",
                name,
                # By position: verl calls the first one old, whichever policy it is of.
                lambda policy: function(
                    against, policy, tokens, mask, aggregation, config, weights
                )[0],
            )

        clips: Settings = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
        for aggregation in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
            yield loss(f"clipped {aggregation}", "vanilla", aggregation=aggregation, settings=clips)
        yield loss(
            "clipped seq-mean-token-sum-norm",
            "vanilla",
            aggregation="seq-mean-token-sum-norm",
            settings={**clips, "global_batch_info": {"loss_scale_factor": 7}},
        )
        yield loss("clipped bypass", "vanilla", against=at.rollout, settings=clips)
        narrow: Settings = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.06}
        yield loss("gspo", "gspo", aggregation="seq-mean-token-mean", settings=narrow)
        yield loss("sapo", "sapo", aggregation="seq-mean-token-mean")
        yield loss("gpg", "gpg")
        yield loss("cispo", "cispo", settings=clips)
        gmpo: Settings = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
        yield loss("gmpo", "geo_mean", settings=gmpo)
        yield loss("dppo_tv", "dppo_tv", settings={**narrow, "clip_ratio_c": 20.0})
        tight: Settings = {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02, "clip_ratio_c": 20.0}
        yield loss("dppo_kl", "dppo_kl", settings=tight)
        clip_cov: Settings = {"clip_cov_ratio": 0.99, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0}
        yield loss("clip_cov", "clip_cov", policy_loss=clip_cov, settings=clips)
        yield loss("kl_cov", "kl_cov", policy_loss={"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5})

        log_ratio = at.proximal - at.rollout
        for name, level, threshold in (
            ("weights token truncated", "token", 1.3),
            ("weights sequence truncated", "sequence", 1.3),
            ("weights token masked", "token", "0.7_1.3"),
            ("weights sequence masked", "sequence", "0.5_2.0"),
        ):
            weights, _ = rollout_corr_helper.compute_rollout_correction_weights(
                log_ratio, mask, rollout_is=level, rollout_is_threshold=threshold
            )
            yield {"source": "verl", "name": name, "value": (weights * mask).tolist()}
            if level == "token":
                yield loss(f"clipped with {name}", "vanilla", weights=weights, settings=clips)
        for name, option, threshold in (
            ("rejection token", "token_k1", 1.4),
            ("rejection sequence", "seq_sum_k1", 1.7),
            ("rejection geometric", "seq_mean_k1", 1.1),
        ):
            kept, _ = rollout_corr_helper.compute_rollout_rejection_mask(
                log_ratio, mask, rollout_rs=option, rollout_rs_threshold=threshold
            )
            yield {"source": "verl", "name": name, "value": kept.tolist()}

        for estimator in ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"):

            def penalty(policy: Any, estimator: str = estimator) -> Any:  # noqa: ANN401
                return (core_algos.kl_penalty(policy, at.ref, estimator) * mask).sum()

            yield self.loss("verl", f"kl {estimator}", penalty)
        controller = core_algos.AdaptiveKLController(0.1, 2.0, 100.0)
        controller.update(2.2, 50)
        yield {"source": "verl", "name": "adaptive coefficient", "value": float(controller.value)}
        yield from self.verl_advantages(core_algos)

    def verl_advantages(self, core_algos: Any) -> Iterator[Case]:  # noqa: ANN401
        """The advantage estimators."""
        import numpy as np  # noqa: PLC0415

        at, mask = self.at, self.mask
        index = np.array(at.groups.tolist())
        last = self.torch.zeros_like(mask)
        last[self.torch.arange(6), 6 - at.mask.flip(1).int().argmax(1)] = 1.0
        outcome = last * at.rewards[:, None]
        calls: dict[str, tuple[str, dict[str, Any]]] = {
            "advantages grpo": ("grpo", {"index": index}),
            "advantages dr_grpo": ("grpo", {"index": index, "norm_adv_by_std_in_grpo": False}),
            "advantages rloo": ("rloo", {"index": index}),
            "advantages rloo vectorized": ("rloo_vectorized", {"index": index}),
            "advantages opo": ("opo", {"index": index}),
            "advantages gpg": ("gpg", {"index": index}),
            "advantages reinforce++ baseline": ("reinforce_plus_plus_baseline", {"index": index}),
            "advantages remax": ("remax", {"reward_baselines": at.greedy_rewards}),
        }
        for name, (estimator, arguments) in calls.items():
            advantages, _ = core_algos.get_adv_estimator_fn(estimator)(
                token_level_rewards=outcome.clone(), response_mask=mask, **arguments
            )
            # One per sequence, which stands at its first token.
            yield {"source": "verl", "name": name, "value": advantages[:, 0].tolist()}
        config = {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 0.5]}
        advantages, _ = core_algos.get_adv_estimator_fn("gdpo")(
            token_level_rewards=outcome,
            response_mask=mask,
            index=index,
            config=config,
            non_tensor_batch={
                "a": np.array(at.more_rewards[:, 0].tolist()),
                "b": np.array(at.more_rewards[:, 1].tolist()),
            },
            batch={
                "prompts": self.torch.zeros(6, 1),
                "attention_mask": self.torch.cat([at.mask[:, :1], at.mask], dim=1).long(),
            },
        )
        # verl turns several rewards into float32, whatever the dtype of the rest.
        yield {
            "source": "verl",
            "name": "advantages gdpo",
            "value": advantages[:, 0].tolist(),
            "tolerance": 1e-5,
        }
        advantages, returns = core_algos.get_adv_estimator_fn("reinforce_plus_plus")(
            token_level_rewards=at.token_rewards,
            response_mask=mask,
            config=SimpleNamespace(gamma=0.9),
        )
        yield {"source": "verl", "name": "returns", "value": returns.tolist()}
        yield {"source": "verl", "name": "advantages reinforce++", "value": advantages.tolist()}
        advantages, returns = core_algos.get_adv_estimator_fn("gae")(
            at.token_rewards, at.values, mask, 0.9, 0.8
        )
        yield {"source": "verl", "name": "gae", "value": (advantages * mask).tolist()}
        yield {"source": "verl", "name": "gae returns", "value": (returns * mask).tolist()}

    def trl(self) -> Iterator[Case]:
        """The losses of TRL's GRPO trainer, called without a model."""
        from collections import defaultdict  # noqa: PLC0415

        GRPOTrainer = importlib.import_module("trl").GRPOTrainer  # noqa: N806

        at, mask, torch = self.at, self.mask, self.torch

        def loss(name: str, **settings: Any) -> Case:  # noqa: ANN401
            def compute(policy: Any) -> Any:  # noqa: ANN401
                trainer = SimpleNamespace(
                    **{
                        "_get_per_token_logps_and_entropies": lambda *_, **__: (
                            policy,
                            torch.zeros_like(policy),
                            None,
                        ),
                        "model": SimpleNamespace(training=False),
                        "accelerator": SimpleNamespace(
                            num_processes=1,
                            gather=lambda tensor: tensor,
                            reduce=lambda tensor, reduction: tensor,  # noqa: ARG005
                        ),
                        "_metrics": {"eval": defaultdict(list)},
                        "args": SimpleNamespace(
                            delta=None,
                            use_bias_correction_kl=False,
                            sapo_temperature_pos=1.0,
                            sapo_temperature_neg=1.05,
                        ),
                        "aux_loss_enabled": False,
                        "top_entropy_quantile": 1.0,
                        "off_policy_mask_threshold": None,
                        "importance_sampling_level": "token",
                        "beta": 0.0,
                        "epsilon_low": 0.2,
                        "epsilon_high": 0.28,
                        "use_vllm": False,
                        "vllm_importance_sampling_correction": False,
                        "max_completion_length": 7,
                        "_entropy_bonus_enabled": False,
                        "current_gradient_accumulation_steps": 1,
                        **settings,
                    }
                )
                inputs = {
                    "prompt_ids": torch.zeros(6, 1, dtype=torch.int64),
                    "prompt_mask": torch.ones(6, 1, dtype=torch.int64),
                    "completion_ids": torch.zeros(6, 7, dtype=torch.int64),
                    "completion_mask": mask,
                    "advantages": at.advantages,
                    "old_per_token_logps": at.proximal,
                    "ref_per_token_logps": at.ref,
                    "num_items_in_batch": mask.sum(),
                }
                return GRPOTrainer._compute_loss(trainer, None, inputs)  # noqa: SLF001

            return self.loss("trl", name, compute)

        yield loss("clipped seq-mean-token-mean", loss_type="grpo")
        yield loss("clipped token-mean", loss_type="dapo")
        yield loss("clipped seq-mean-token-sum-norm", loss_type="dr_grpo")
        yield loss("clipped with kl", loss_type="grpo", beta=0.04)
        yield loss("sapo", loss_type="sapo")
        yield loss("cispo one-sided", loss_type="cispo", epsilon_high=1.2)
        yield loss(
            "gspo",
            loss_type="grpo",
            importance_sampling_level="sequence",
            epsilon_low=0.05,
            epsilon_high=0.06,
        )


def load_tests() -> ModuleType:
    """The package's test module that knows our side of every case."""
    spec = importlib.util.spec_from_file_location("test_parity", TESTS / "test_parity.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"expected {TESTS / 'test_parity.py'}, which compares the cases")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(python: Path, *, write: bool) -> bool:
    """Print the largest difference of each case; False if one is too large."""
    ours = load_tests()
    agreed = True
    for dtype, allowed in (("float64", 1e-6), ("float32", 1e-5)):
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder) / "answer.json"
            subprocess.run([python, __file__, "--reference", dtype, answer], check=True)
            reference = json.loads(answer.read_text(encoding="utf-8"))
        for case in reference["cases"]:
            tolerance = max(allowed, case.get("tolerance", 0.0))
            worst = ours.largest_difference(case, reference["inputs"], dtype=dtype)
            agreed = agreed and worst <= tolerance
            verdict = "ok" if worst <= tolerance else f"DIFFERS by more than {tolerance:g}"
            print(f"{dtype}  {case['source']:<4}  {case['name']:<40} {worst:.1e}  {verdict}")
        if dtype == "float64" and write:
            content = {
                "command": "./run tools/check_algos_parity.py --write",
                "versions": {**VERSIONS, "torch": reference["torch"]},
                "dtype": dtype,
                "inputs": reference["inputs"],
                "cases": reference["cases"],
            }
            FIXTURES.parent.mkdir(exist_ok=True)
            FIXTURES.write_text(json.dumps(content) + "\n", encoding="utf-8")
            print(f"wrote {FIXTURES.relative_to(ROOT)}")
    return agreed


def main() -> int:
    """Run both sides; 0 if they agree."""
    parser = argparse.ArgumentParser(description="Compare our formulas with verl's and TRL's.")
    parser.add_argument("--write", action="store_true", help="write the fixtures of the tests")
    parser.add_argument(
        "--environment",
        type=Path,
        default=Path(tempfile.gettempdir()) / "algos-parity-environment",
        help="folder of the environment with verl and TRL; built if it is missing",
    )
    parser.add_argument("--reference", nargs=2, metavar=("DTYPE", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reference is None:
        return 0 if compare(environment(options.environment), write=options.write) else 1
    import torch  # noqa: PLC0415

    dtype, answer = options.reference
    inputs = make_inputs()
    reference = Reference(inputs, dtype)
    cases = [*reference.verl(), *reference.trl()]
    Path(answer).write_text(
        json.dumps({"torch": torch.__version__, "inputs": inputs, "cases": cases}),
        encoding="utf-8",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
