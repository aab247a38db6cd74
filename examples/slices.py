"""A recipe on one device: its settings, with few of the model's layers and short sequences."""

import attrs
from conduct import RunSettings
from made_up import MadeUpModel, MadeUpWords, mean_characters
from recipe import Recipe

from parallel_state import ParallelState


def slice_of(
    recipe: Recipe,
    model: MadeUpModel,
    *,
    num_steps: int,
    groups_per_step: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    max_tokens_per_micro_batch: int,
    kv_cache_gib: float,
    picture_side: int = 0,
) -> Recipe:
    """A recipe whose trainer and sampler take turns on one device, with everything else as it is.

    The model is made up, and so are the problems: half of the completions are rewarded. Nothing is
    kept but the model at the end, since a checkpoint would take longer than all steps.

    Args:
        recipe: at full size.
        model: layers of the recipe's model.
        num_steps: optimizer steps.
        groups_per_step: prompts that one of them consumes.
        max_prompt_tokens: of every prompt.
        max_new_tokens: of nearly every completion, as a random policy hardly ever ends one.
        max_tokens_per_micro_batch: token budget of one forward pass.
        kv_cache_gib: of the sampler; a fixed size, so that others may use the device too.
        picture_side: pixels along one side of a prompt's picture; 0 for none.
    """
    path = str(model.folder)
    loop, overlong = recipe.loop, recipe.loop.overlong
    if overlong is not None:
        buffer = max(1, overlong.buffer * max_new_tokens // overlong.max_length)
        overlong = attrs.evolve(overlong, max_length=max_new_tokens, buffer=buffer)
    return Recipe(
        data=MadeUpWords(
            max_prompt_tokens=max_prompt_tokens,
            max_characters=round(max_new_tokens * mean_characters(model.facts.vocab_size)),
            picture_side=picture_side,
        ),
        loop=attrs.evolve(
            loop,
            num_steps=num_steps,
            groups_per_step=groups_per_step,
            max_new_tokens=max_new_tokens,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            overlong=overlong,
            evaluate_every=num_steps,
            evaluation_samples=1,
        ),
        engine=attrs.evolve(recipe.engine, model_path=path, parallel=ParallelState()),
        sampler=attrs.evolve(
            recipe.sampler,
            model=path,
            max_model_len=max_prompt_tokens + max_new_tokens,
            tensor_parallel_size=1,
            data_parallel_size=1,
            expert_parallel_size=1,
            kv_cache_gib=kv_cache_gib,
            gpu_memory_utilization=None,
            max_num_batched_tokens=None,  # those of the full size are for its lengths
            enable_sleep=True,
        ),
        run=RunSettings(checkpoint_every=None),
    )
