"""The optimizer of all weights that are trained, and its state by name."""

from collections.abc import Iterator, Mapping
from typing import final

import torch
from torch import Tensor

from engine_fsdp.config import MuonConfig
from engine_fsdp.eight_bit import EightBitAdamW
from rl_contracts import OptimConfig


@final
class PolicyOptimizer:
    """AdamW over named parameters; over some of them, if asked, Muon or AdamW in 8 bits.

    Its state is there from the beginning as far as others can see, so that a checkpoint of an
    engine that has not stepped yet has the same tensors as any other.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        config: OptimConfig,
        *,
        muon: MuonConfig | None,
        matrices: frozenset[str],
        eight_bit: frozenset[str] = frozenset(),
    ) -> None:
        """Take the parameters over.

        Args:
            parameters: all that are trained, by name.
            config: how.
            muon: of the matrices; None for AdamW everywhere.
            matrices: names of the two-dimensional parameters that map hidden states to hidden
                states, which Muon is for; neither embedding nor head (Jordan 2024).
            eight_bit: names of those whose moments have 8 bits; see `EightBitAdamW`.

        Raises:
            ImportError: without torchao, if `eight_bit` names any.
        """
        self._parameters = dict(parameters)
        self._config = config
        small = {name: p for name, p in parameters.items() if name in eight_bit}
        others = {name: p for name, p in parameters.items() if name not in small}
        by_muon = matrices & others.keys() if muon is not None else frozenset[str]()
        self._eight_bit = EightBitAdamW(small, config) if small else None
        self._moments = {
            name: ("momentum_buffer",) if name in by_muon else ("exp_avg", "exp_avg_sq")
            for name in others
        }
        self._optimizer_of: dict[str, torch.optim.Optimizer] = {}
        if plain := {name: p for name, p in others.items() if name not in by_muon}:
            adamw = torch.optim.AdamW(
                list(plain.values()),
                lr=config.learning_rate,
                betas=config.betas,
                eps=config.eps,
                weight_decay=config.weight_decay,
                fused=True,
            )
            self._optimizer_of.update(dict.fromkeys(plain, adamw))
        if muon is not None:
            # On DTensors torch gathers what a product needs; the result is that of one rank up to
            # its bfloat16 rounding (torch 2.13, optim/_muon.py).
            orthogonal = torch.optim.Muon(
                [p for name, p in others.items() if name in by_muon],
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                momentum=muon.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
            self._optimizer_of.update(dict.fromkeys(by_muon, orthogonal))
        self._optimizers = tuple(dict.fromkeys(self._optimizer_of.values()))

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """All that are trained, by name."""
        return self._parameters

    def check_rate(self, *, steps_done: int) -> None:
        """Refuse to step past the end of a schedule that fell to 0.

        Raises:
            ValueError: if the learning rate is 0.
        """
        if self._config.learning_rate_at(steps_done) == 0.0:
            message = (
                f"optim_step: the learning rate is 0 after {steps_done} steps, since the "
                f"{self._config.schedule} schedule ended after total_steps = "
                f"{self._config.total_steps}, so that no weight would change; raise total_steps, "
                "or set final_learning_rate"
            )
            raise ValueError(message)

    def step(self, *, steps_done: int) -> None:
        """One step along the gradients, at the rate that follows `steps_done` steps."""
        rate = self._config.learning_rate_at(steps_done)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        if self._eight_bit is not None:
            self._eight_bit.step(rate=rate)

    def drop_gradients(self) -> None:
        """Free all gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self._eight_bit is not None:
            self._eight_bit.drop_gradients()

    def held(self) -> Iterator[Tensor]:
        """The tensors of its state that take memory so far; 32 bits have none before a step."""
        for optimizer in self._optimizers:
            for held in optimizer.state.values():
                yield from (tensor for tensor in held.values() if tensor.ndim)
        if self._eight_bit is not None:
            yield from self._eight_bit.held()

    def state(self) -> dict[str, Tensor]:
        """Steps and moments by name: the optimizers' own tensors, to be copied from or into."""
        state: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if name not in self._optimizer_of:
                assert self._eight_bit is not None  # noqa: S101  # for the type checker
                small = self._eight_bit.state(name)
                state.update((f"optim.{part}.{name}", tensor) for part, tensor in small.items())
                continue
            held = self._optimizer_of[name].state[parameter]
            if not held:  # what they start from
                held.update((moment, torch.zeros_like(parameter)) for moment in self._moments[name])
                if "exp_avg" in held:
                    held["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            if "step" in held:
                state[f"optim.step.{name}"] = held["step"].view(1)
            state.update((f"optim.{moment}.{name}", held[moment]) for moment in self._moments[name])
        return state
