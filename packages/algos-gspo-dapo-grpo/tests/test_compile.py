"""The whole loss is one graph: nothing in it waits for a device.

In a process of its own, since functions that went through the shape checker cannot be compiled.
"""

import subprocess
import sys
from typing import get_args

from algos_gspo_dapo_grpo import PolicyLoss

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
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    graphs_of = dict(line.split() for line in done.stdout.splitlines())
    assert graphs_of == {member.__name__: "1" for member in get_args(PolicyLoss)}
