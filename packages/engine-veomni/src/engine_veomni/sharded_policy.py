"""A model of VeOmni's with its weights over the ranks: what engine and scorer compute with."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from engine_veomni.build import build_model, check_experts, expert_inner_size, read_model_config
from engine_veomni.config import VeomniConfig
from engine_veomni.devices import check_device, check_expert_settings
from engine_veomni.quiet import quiet
from engine_veomni.token_logprobs import token_logprobs
from engine_veomni.veomni_state import VeomniState
from engine_veomni.versions import check_veomni_version
from rl_contracts.train import BatchT


@final
class ShardedPolicy:
    """The weights of a folder, sharded, and how they score tokens.

    Raises what `engine_veomni.VeomniEngine` says that it raises.
    """

    def __init__(self, config: VeomniConfig, *, device: torch.device) -> None:
        self.veomni_version = check_veomni_version()
        check_device(device, compute_dtype=config.compute_dtype)
        model_config = read_model_config(config)
        check_expert_settings(
            config,
            hidden_size=model_config.hidden_size,
            inner_size=expert_inner_size(model_config),
            device=device,
        )
        with quiet(logging.INFO):
            self.state = VeomniState(config.parallel, device_type=device.type)
            self.model, self.kernels = build_model(config, model_config, self.state, device=device)
            with self.state.entered():
                self.expert_sharding = check_experts(self.model, config.parallel, self.state)
        self.vocab_size = model_config.vocab_size
        self._device = device
        self._temperature = config.temperature

    def logprobs(self, batch: BatchT) -> Float[Tensor, " tokens"]:
        """Log-probabilities of the given tokens; call it inside of `entered`."""
        return token_logprobs(
            self.model,
            batch,
            device=self._device,
            temperature=self._temperature,
            ulysses_group=self.state.ulysses_group,
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """VeOmni's code sees this policy's parallel state and kernels."""
        self.kernels.bind()
        with self.state.entered():
            yield

    def reshard(self) -> None:
        """Give the gathered weights back: FSDP2 keeps the root's after a pass without gradient.

        Left gathered, they are what the optimizer would step, and not the shards.
        """
        from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415

        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
