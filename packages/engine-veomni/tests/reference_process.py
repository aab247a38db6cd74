"""Plain transformers, in a process that VeOmni never enters: models, logprobs, one AdamW step."""

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from scenario_data import (
    ADVANTAGES,
    BALANCE,
    DENSE_NAMES,
    EPS,
    LEARNING_RATE,
    LENGTHS,
    MASKED_ROWS,
    MODEL_ARGS,
    PROMPT_LENGTH,
    SQUARE_ARGS,
    TEMPERATURE,
    num_loss_tokens,
    row,
)
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func


def row_logprobs(model: torch.nn.Module, index: int) -> torch.Tensor:
    ids = row(index)
    logits = model(input_ids=ids[None], use_cache=False).logits[0].float() / TEMPERATURE
    picked = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None]).squeeze(-1)
    logprobs = torch.cat([torch.zeros(1), picked])
    mask = (torch.arange(LENGTHS[index]) >= PROMPT_LENGTH) & (index not in MASKED_ROWS)
    return torch.where(mask, logprobs, 0.0)


def row_routes(model: torch.nn.Module, index: int) -> torch.Tensor:
    """Sorted experts of each token and layer; none of a dense model."""
    output = model(input_ids=row(index)[None], use_cache=False, output_router_logits=True)
    top_k = MODEL_ARGS["num_experts_per_tok"]
    chosen = [logits.topk(top_k).indices.sort().values for logits in output.router_logits]
    return torch.stack(chosen, dim=1)


def balancing_loss(model: torch.nn.Module) -> torch.Tensor:
    """Of all rows at once: transformers' loss is no sum over rows."""
    rows = [
        model(input_ids=row(index)[None], use_cache=False, output_router_logits=True).router_logits
        for index in range(len(LENGTHS))
    ]
    layers: Any = tuple(torch.cat(layer) for layer in zip(*rows, strict=True))
    loss = load_balancing_loss_func(
        layers, MODEL_ARGS["num_experts"], MODEL_ARGS["num_experts_per_tok"]
    )
    assert isinstance(loss, torch.Tensor)
    return loss


def write_balanced(model: PreTrainedModel, folder: Path) -> None:
    """The model after one step along the loss and the balancing loss; ends with both."""
    logprobs = [row_logprobs(model, index).sum() for index in range(len(LENGTHS))]
    loss = -(torch.tensor(ADVANTAGES) * torch.stack(logprobs)).sum() / num_loss_tokens()
    balancing = balancing_loss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS, weight_decay=0.01)
    (loss + BALANCE * balancing).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    optimizer.step()
    model.save_pretrained(folder / "balanced")
    save_file(
        {"balancing": balancing.detach(), "loss": loss.detach(), "norm": norm},
        folder / "balanced.safetensors",
    )


def new_model(args: dict[str, Any]) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(**args, dtype="float32")
    return Qwen3MoeForCausalLM(config)


def make(folder: Path) -> None:
    torch.manual_seed(0)
    square = new_model(SQUARE_ARGS)
    with torch.no_grad():
        experts = square.model.layers[0].mlp.experts
        experts.gate_up_proj[:, :3] = 1.0
        experts.gate_up_proj[:, 3:] = 2.0
        experts.down_proj.copy_(torch.arange(18.0).view(2, 3, 3))
    square.save_pretrained(folder / "square")

    write_reference(new_model(MODEL_ARGS), folder)
    dense_args = {name: value for name, value in MODEL_ARGS.items() if name in DENSE_NAMES}
    write_reference(Qwen3ForCausalLM(Qwen3Config(**dense_args, dtype="float32")), folder / "dense")


def write_reference(model: PreTrainedModel, folder: Path) -> None:
    """A model that was moved away from its first weights, and what plain transformers make of it.

    Below `folder`: the model, its logprobs, loss and gradient norm, and the model after a step.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder / "model")
    logprobs = {f"row-{index}": row_logprobs(model, index) for index in range(len(LENGTHS))}
    routes = {}
    if isinstance(model, Qwen3MoeForCausalLM):
        routes = {f"routes-row-{index}": row_routes(model, index) for index in range(len(LENGTHS))}
        write_balanced(copy.deepcopy(model), folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS, weight_decay=0.01)
    sums = torch.stack([logprobs[f"row-{index}"].sum() for index in range(len(LENGTHS))])
    loss = -(torch.tensor(ADVANTAGES) * sums).sum() / num_loss_tokens()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    optimizer.step()
    model.save_pretrained(folder / "stepped")
    save_file(
        {
            **{name: value.detach() for name, value in logprobs.items()},
            **routes,
            "loss": loss.detach(),
            "norm": norm,
        },
        folder / "reference.safetensors",
    )


def reload(folder: Path) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder / "trained", output_loading_info=True)
    model, report = loaded
    assert not any(report.values()), report
    logprobs = {f"row-{index}": row_logprobs(model, index) for index in range(len(LENGTHS))}
    save_file(
        {name: value.detach() for name, value in logprobs.items()}, folder / "reloaded.safetensors"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"make": make, "reload": reload}[sys.argv[1]](Path(sys.argv[2]))
