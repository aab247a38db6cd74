"""A model of VeOmni's with its weights over the ranks: what engine and scorer compute with."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from engine_veomni.build import (
    build_model,
    check_experts,
    check_replay,
    expert_inner_size,
    read_model_config,
    router_shape,
    text_config,
)
from engine_veomni.config import VeomniConfig
from engine_veomni.devices import (
    check_device,
    check_expert_settings,
    check_offload,
    check_vision_settings,
)
from engine_veomni.quiet import quiet
from engine_veomni.token_logprobs import token_logprobs
from engine_veomni.veomni_state import VeomniState
from engine_veomni.versions import check_veomni_version
from engine_veomni.vision import Vision, vision_shape
from rl_contracts.batch_checks import ImageCheck, takes_no_images
from rl_contracts.train import BatchT


@final
class ShardedPolicy:
    """The weights of a folder, sharded, and how they score tokens.

    Raises what `engine_veomni.VeomniEngine` says that it raises.
    """

    def __init__(self, config: VeomniConfig, *, device: torch.device) -> None:
        self.veomni_version = check_veomni_version()
        check_device(device, compute_dtype=config.compute_dtype)
        check_offload(device, offload=config.offload)
        model_config = read_model_config(config)
        text = text_config(model_config)
        sight = vision_shape(model_config)
        check_vision_settings(config, sees=sight is not None)
        check_expert_settings(
            config,
            hidden_size=text.hidden_size,
            inner_size=expert_inner_size(text),
            device=device,
        )
        self.routers = router_shape(text)
        check_replay(config, text, self.routers)
        with quiet(logging.INFO):
            self.state = VeomniState(config.parallel, device_type=device.type)
            self.model, self.kernels = build_model(config, model_config, self.state, device=device)
            with self.state.entered():
                self.expert_sharding = check_experts(self.model, config.parallel, self.state)
        self.vocab_size = text.vocab_size
        self._vision = None if sight is None else Vision(self.model, sight, device=device)
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
            vision=self._vision,
        )

    @property
    def image_check(self) -> ImageCheck:
        """What this model finds wrong with the images of a micro-batch."""
        return takes_no_images if self._vision is None else self._vision.problem_of

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
