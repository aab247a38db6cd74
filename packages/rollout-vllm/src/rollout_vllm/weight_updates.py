"""New weights, and sleep, for a sampler that runs: checked, one at a time, and all or nothing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import final

from rl_contracts.rollout import PolicyVersion
from rollout_vllm.config import VllmConfig
from rollout_vllm.engine import Engine, InFlight
from rollout_vllm.errors import RolloutError, SamplerClosedError, WeightUpdateError
from rollout_vllm.headers import TensorHeader
from rollout_vllm.lifetime import Lifetime
from rollout_vllm.lora import check_is_adapter
from rollout_vllm.publication import Publication
from rollout_vllm.sleep import MemoryChange, Part, SleepState
from rollout_vllm.weights_check import check_published


@final
class WeightUpdates:
    """What `VllmSampler` does about weights and memory; see the methods there."""

    def __init__(
        self,
        engine: Engine,
        lifetime: Lifetime,
        *,
        config: VllmConfig,
        policy_version: PolicyVersion,
        tensors: Mapping[str, TensorHeader],
    ) -> None:
        self._engine = engine
        self._lifetime = lifetime
        self._config = config
        self._tensors = tensors
        self._one_at_a_time = asyncio.Lock()
        self.policy_version = policy_version
        """Version of the weights that the next token will be drawn from."""

        self.sleep_state = SleepState(possible=config.enable_sleep, device=config.device)

    async def load(self, published: Publication, *, keep: bool, in_flight: InFlight) -> None:
        """See `VllmSampler.load_published`."""
        async with self._one_at_a_time:
            try:
                await self.check(published)
            except (ValueError, RolloutError) as error:
                await asyncio.to_thread(published.refuse, str(error))
                raise
            update = asyncio.ensure_future(self._update(published, in_flight))
            try:
                await asyncio.shield(update)
            except asyncio.CancelledError:
                # half an update is no state to stop in
                await update
                raise
        if not keep:
            published.remove()

    async def check(self, published: Publication) -> None:
        """See `VllmSampler.check_published`."""
        # refuses nothing: others may take what is offered
        self._lifetime.check_open()
        self.sleep_state.check_load()
        self._check_version(published.version)
        self._check_names_known()
        await asyncio.to_thread(self._check_tensors, published)

    async def sleep(self, *, keep_weights: bool, in_flight: InFlight) -> MemoryChange:
        """See `VllmSampler.sleep`."""
        async with self._one_at_a_time:
            self._lifetime.check_open()
            self.sleep_state.check_sleep()
            async with self._ends_if_broken():
                before = await self._engine.used_memory()
                await self._hold(in_flight, "sleep")
                await self._engine.sleep(keep_weights=keep_weights)
                self.sleep_state.slept(keep_weights=keep_weights)
                after = await self._engine.used_memory()
            return MemoryChange(used_before=before, used_after=after)

    async def wake(self, parts: Sequence[Part]) -> MemoryChange:
        """See `VllmSampler.wake`."""
        async with self._one_at_a_time:
            self._lifetime.check_open()
            self.sleep_state.check_wake(parts)
            async with self._ends_if_broken():
                before = await self._engine.used_memory()
                await self._engine.wake(parts)
                self.sleep_state.woke(parts)
                after = await self._engine.used_memory()
            return MemoryChange(used_before=before, used_after=after)

    @contextlib.asynccontextmanager
    async def _ends_if_broken(self) -> AsyncIterator[None]:
        """Close the sampler if its engine dies meanwhile, or stops half-way."""
        try:
            yield
        except SamplerClosedError as error:
            await self._lifetime.end(error)
            raise

    async def _update(self, published: Publication, in_flight: InFlight) -> None:
        # a sampler whose caches sleep holds its requests already, and until they are awake
        asleep = bool(self.sleep_state.asleep)
        if not asleep:
            try:
                await self._hold(in_flight, "load_published")
            except TimeoutError as error:
                await asyncio.to_thread(published.refuse, str(error))
                raise
        limit = self._config.weight_update_timeout_s
        try:
            async with asyncio.timeout(limit):
                await self._engine.update_weights(
                    published.instructions(), version=published.version
                )
                self.policy_version = published.version
                self.sleep_state.loaded()
                if not asleep:
                    await self._engine.go_on()
        except TimeoutError as error:
            message = (
                f"load_published: the engine did not take version {published.version} within "
                f"{limit:g} s (VllmConfig.weight_update_timeout_s)"
            )
            failure = WeightUpdateError(message)
            await self._lifetime.end(failure)
            raise failure from error
        except ConnectionError:
            if not asleep:
                await self._engine.go_on()
            raise
        except SamplerClosedError as error:
            await self._lifetime.end(error)
            raise

    async def _hold(self, in_flight: InFlight, what: str) -> None:
        """Let no request move; if that takes too long, let them go on and say so."""
        limit = self._config.weight_update_timeout_s
        try:
            async with asyncio.timeout(limit):
                await self._engine.hold(in_flight)
        except TimeoutError as error:
            await self._engine.go_on()
            hint = '; give another in_flight than "wait", or a longer limit'
            message = (
                f"{what}: requests still run after {limit:g} s "
                "(VllmConfig.weight_update_timeout_s), nothing was touched"
            )
            raise TimeoutError(message + hint * (in_flight == "wait")) from error
        except SamplerClosedError as error:
            await self._lifetime.end(error)
            raise

    def _check_version(self, version: PolicyVersion) -> None:
        running = len(self._lifetime.running)
        if version < self.policy_version and running:
            message = (
                f"load_published: expected version {self.policy_version} or later while "
                f"{running} requests run (versions never fall along a completion), got {version}"
            )
            raise ValueError(message)

    def _check_tensors(self, published: Publication) -> None:
        adapted = self._config.lora is not None
        if adapted:
            check_is_adapter(published.tensors(), self._tensors)
        check_published(
            published,
            model=self._tensors,
            dtype=self._config.dtype,
            tied=self._engine.tied and not adapted,  # an adapter has no head
        )

    def _check_names_known(self) -> None:
        if not self._tensors:
            message = (
                "load_published: the names and shapes of the weights are not known, as "
                f"VllmConfig.load_format is 'dummy' and {self._config.model!r} holds no "
                "*.safetensors"
            )
            raise ValueError(message)
