"""The whole loss is one graph, waits for no device and reads its tokens a few times only.

What is compiled runs in a process of its own, since functions that went through the shape checker
cannot be compiled.
"""

import subprocess
import sys
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from algos_gspo_dapo_grpo import (
    BatchCounts,
    Bypass,
    CispoLoss,
    ClipCovLoss,
    DapoLoss,
    DecoupledPpoLoss,
    DppoKlLoss,
    DppoTvLoss,
    GmpoLoss,
    GpgLoss,
    GrpoLoss,
    GspoLoss,
    GspoTokenLoss,
    KlCovLoss,
    KlPenalty,
    LossShare,
    PolicyLoss,
    SapoLoss,
    Sequences,
    SequenceTruncation,
    TokenTruncation,
    ToprLoss,
    WeightMasking,
    policy_loss,
)

KL = KlPenalty(coefficient=0.1)
LOSSES: tuple[PolicyLoss, ...] = (
    GrpoLoss(dual_clip=3.0, kl=KL, rollout_correction=TokenTruncation()),
    DapoLoss(),
    GspoLoss(kl=KL, rollout_correction=SequenceTruncation()),
    GspoTokenLoss(),
    CispoLoss(rollout_correction=Bypass()),
    SapoLoss(),
    GmpoLoss(rollout_correction=WeightMasking(level="geometric")),
    DppoTvLoss(),
    DppoKlLoss(),
    ClipCovLoss(),
    KlCovLoss(),
    GpgLoss(),
    DecoupledPpoLoss(),
    ToprLoss(),
)

SCRIPT = """
import torch
from algos_gspo_dapo_grpo import *

def step(policy, proximal, rollout, ref, advantages, mask, selected, cu_seqlens, counts, config):
    return policy_loss(
        policy,
        proximal_logprobs=proximal,
        advantages=advantages,
        loss_mask=mask,
        sequences=Sequences.packed(cu_seqlens, num_tokens=policy.shape[0]),
        config=config,
        counts=counts,
        rollout_logprobs=rollout,
        ref_logprobs=ref,
        selected_tokens=selected,
    )

graphs = 0
def backend(graph, inputs):
    global graphs
    graphs += 1
    return graph.forward

for config in (
    GrpoLoss(dual_clip=3.0, kl=KlPenalty(coefficient=0.1), rollout_correction=TokenTruncation()),
    GspoLoss(clip_low=0.1, clip_high=0.1),
    DapoLoss(rollout_correction=TokenTruncation()),
    GspoTokenLoss(rollout_correction=SequenceTruncation()),
    CispoLoss(rollout_correction=Bypass()),
    SapoLoss(kl=KlPenalty(coefficient=0.1, estimator="k3+")),
    GmpoLoss(rollout_correction=WeightMasking(level="geometric")),
    DppoTvLoss(),
    DppoKlLoss(rollout_correction=Bypass()),
    ClipCovLoss(),
    KlCovLoss(),
    GpgLoss(),
    DecoupledPpoLoss(),
    ToprLoss(),
):
    with_ref = not isinstance(config, DapoLoss) and config.kl is not None
    bypass = isinstance(config.rollout_correction, Bypass)
    selects = isinstance(config, ClipCovLoss | KlCovLoss)
    before = graphs
    torch.compiler.reset()  # one function is compiled for at most eight configurations
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for lengths in ((3, 0, 4), (5, 6), (2, 2, 2, 9)):
        n = sum(lengths)
        policy = (0.2 * torch.randn(n)).requires_grad_()
        arguments = (
            None if bypass else torch.zeros(n), torch.zeros(n),
            torch.zeros(n) if with_ref else None,
            torch.randn(len(lengths)), torch.rand(n) < 0.7,
            torch.rand(n) < 0.3 if selects else None,
            torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
            BatchCounts(num_tokens=100 + n, num_sequences=10 + len(lengths)), config,
        )
        plain, graph = step(policy, *arguments), compiled(policy, *arguments)
        torch.testing.assert_close(graph, plain)
        torch.testing.assert_close(
            torch.autograd.grad(graph.loss, policy), torch.autograd.grad(plain.loss, policy)
        )
    print(type(config).__name__, graphs - before)

torch.compiler.reset()
rewards, ids = torch.randn(6).abs(), torch.tensor([5, 5, 2, 2, 2, 9])
for config in (GrpoAdvantages(), RlooAdvantages(), GpgAdvantages(), MaxRlAdvantages()):
    advantages = torch.compile(group_advantages, fullgraph=True, backend="eager")
    torch.testing.assert_close(
        advantages(rewards, ids, config=config), group_advantages(rewards, ids, config=config)
    )
"""


def test_loss_and_advantages_compile_as_one_graph() -> None:
    """Fullgraph, with the same numbers, and new lengths and counts do not compile it anew."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    graphs_of = dict(line.split() for line in done.stdout.splitlines())
    assert graphs_of == {member.__name__: "1" for member in get_args(PolicyLoss)}


def _share(config: PolicyLoss, lengths: list[int], device: str) -> tuple[Tensor, LossShare]:
    """Zeros, with everything that the loss may be given."""
    tokens = sum(lengths)

    def per_token(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(tokens, dtype=dtype, device=device)

    policy = per_token().requires_grad_()
    with_ref = not isinstance(config, DapoLoss) and config.kl is not None
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device)
    share = policy_loss(
        policy,
        proximal_logprobs=None if isinstance(config.rollout_correction, Bypass) else per_token(),
        advantages=torch.zeros(len(lengths), device=device),
        loss_mask=per_token(torch.bool),
        sequences=Sequences.packed(cu_seqlens, num_tokens=tokens),
        config=config,
        counts=BatchCounts(num_tokens=tokens, num_sequences=len(lengths)),
        rollout_logprobs=None if config.rollout_correction is None else per_token(),
        ref_logprobs=per_token() if with_ref else None,
        selected_tokens=(
            per_token(torch.bool) if isinstance(config, ClipCovLoss | KlCovLoss) else None
        ),
    )
    return policy, share


@pytest.mark.parametrize("config", LOSSES, ids=lambda config: type(config).__name__)
def test_no_loss_reads_a_value_back(config: PolicyLoss) -> None:
    """Meta tensors have no values: whatever would wait for a device fails on them."""
    policy, share = _share(config, [3, 0, 4], "meta")
    share.loss.backward()
    assert policy.grad is not None
    with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta tensors"):
        share.loss.item()


class _Scatters(TorchDispatchMode):
    """Notes operations that add in an order of their own, or that no compiler fuses."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Tensor, ...] = (),
        kwargs: dict[str, Tensor] | None = None,
    ) -> Tensor:
        del types
        name = str(func.overloadpacket)
        if any(word in name for word in ("scatter", "index_put", "index_add", "segment_reduce")):
            self.found.append(name)
        result: Tensor = func(*args, **(kwargs or {}))
        return result


@pytest.mark.parametrize("config", LOSSES, ids=lambda config: type(config).__name__)
def test_no_loss_adds_atomically_or_apart(config: PolicyLoss) -> None:
    """Sums have one order, so every run gives the same bits, and are part of the compiled kernels.

    An operation that is not fused reads tokens that had to be written for it.
    """
    with _Scatters() as scatters:
        _, share = _share(config, [9000, 0, 1000], "cpu")
        share.loss.backward()
    assert scatters.found == []


PASSES = """
import copy
from unittest import mock

import torch
from functorch.compile import make_boxed_func
from torch._inductor import config as inductor, scheduler
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering

from algos_gspo_dapo_grpo import *

class Counted(Exception):
    pass

counted = []

def count(graph):
    graph.init_wrapper_code()
    graph._update_scheduler()
    counted.append(graph.count_bytes()[0])
    raise Counted

def count_and_run_plain(graph, inputs, **settings):
    plain, before = copy.deepcopy(graph), len(counted)
    try:
        compile_fx_inner(graph, inputs, **settings)
    except Exception:
        if len(counted) == before:
            raise
    return make_boxed_func(plain.forward)

n, lengths = 1_000_000, [200_000, 0, 500_000, 300_000]
KL = KlPenalty(coefficient=0.1)
for config in (
    DapoLoss(),
    GrpoLoss(dual_clip=3.0, kl=KL, rollout_correction=TokenTruncation()),
    GspoLoss(kl=KL, rollout_correction=SequenceTruncation()),
    GmpoLoss(),
):
    more = config.rollout_correction is not None

    def loss_of(policy, proximal, rollout, ref, advantages, mask, cu_seqlens):
        return policy_loss(
            policy, proximal_logprobs=proximal, advantages=advantages, loss_mask=mask,
            sequences=Sequences.packed(cu_seqlens, num_tokens=n), config=config,
            counts=BatchCounts(num_tokens=n, num_sequences=3),
            rollout_logprobs=rollout, ref_logprobs=ref,
        )

    torch.compiler.reset()
    counted.clear()
    values = [-torch.rand(n) for _ in range(4)]
    with (
        # Triton's schedule needs no GPU; what it would run does.
        inductor.patch({"cpu_backend": "triton", "force_disable_caches": True}),
        mock.patch.object(scheduler, "has_triton", lambda *_: True),
        mock.patch.object(GraphLowering, "_compile_to_module", count),
    ):
        share = torch.compile(
            loss_of, fullgraph=True, dynamic=False,
            backend=lambda graph, inputs: compile_fx(
                graph, inputs, inner_compile=count_and_run_plain
            ),
        )(
            values[0].requires_grad_(), values[1], values[2] if more else None,
            values[3] if more else None, torch.randn(4), torch.rand(n) < 0.9,
            torch.tensor([0, *lengths]).cumsum(0),
        )
        share.loss.backward()
    assert len(counted) == 2  # forward and backward
    print(type(config).__name__, sum(counted) / n / (21 if more else 13))
"""


def test_a_compiled_loss_moves_at_most_three_times_the_least_bytes() -> None:
    """Forward, metrics and backward, by inductor's own count of what its kernels read and write.

    The least is every input read and the gradient written, once: 13 bytes per token, or 21 with
    a sampler and a reference.
    """
    done = subprocess.run(
        [sys.executable, "-c", PASSES], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    passes = [(name, float(number)) for name, number in map(str.split, done.stdout.splitlines())]
    assert len(passes) == 4
    assert [(name, number) for name, number in passes if not 1.0 <= number <= 3.0] == []
