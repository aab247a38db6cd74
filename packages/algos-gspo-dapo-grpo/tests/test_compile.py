"""The whole loss is one graph: nothing in it waits for a device.

In a process of its own, since functions that went through the shape checker cannot be compiled.
"""

import subprocess
import sys

SCRIPT = """
import torch
from algos_gspo_dapo_grpo import (
    BatchCounts, DapoLoss, GrpoLoss, GspoLoss, KlPenalty, Sequences, TokenTruncation, policy_loss,
)
from algos_gspo_dapo_grpo import GrpoAdvantages, group_advantages

def step(policy, proximal, rollout, ref, advantages, mask, cu_seqlens, counts, config):
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
    )

graphs = 0
def backend(graph, inputs):
    global graphs
    graphs += 1
    return graph.forward

compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
for config, with_ref in (
    (GrpoLoss(dual_clip=3.0, kl=KlPenalty(coefficient=0.1),
              rollout_correction=TokenTruncation()), True),
    (GspoLoss(clip_low=0.1, clip_high=0.1), False),
    (DapoLoss(rollout_correction=TokenTruncation()), False),
):
    before = graphs
    for lengths in ((3, 0, 4), (5, 6), (2, 2, 2, 9)):
        n = sum(lengths)
        policy = (0.2 * torch.randn(n)).requires_grad_()
        arguments = (
            torch.zeros(n), torch.zeros(n), torch.zeros(n) if with_ref else None,
            torch.randn(len(lengths)), torch.rand(n) < 0.7,
            torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
            BatchCounts(num_tokens=100 + n, num_sequences=10 + len(lengths)), config,
        )
        plain, graph = step(policy, *arguments), compiled(policy, *arguments)
        torch.testing.assert_close(graph, plain)
        torch.testing.assert_close(
            torch.autograd.grad(graph.loss, policy), torch.autograd.grad(plain.loss, policy)
        )
    print(type(config).__name__, graphs - before)

rewards, ids = torch.randn(6), torch.tensor([5, 5, 2, 2, 2, 9])
advantages = torch.compile(group_advantages, fullgraph=True, backend="eager")
torch.testing.assert_close(
    advantages(rewards, ids, config=GrpoAdvantages()),
    group_advantages(rewards, ids, config=GrpoAdvantages()),
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
    assert done.stdout.split() == ["GrpoLoss", "1", "GspoLoss", "1", "DapoLoss", "1"]
