"""What a plan needs to know of a model: its sizes, read from config.json, and what they come to."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

import attrs

PUBLISHED: Final = Path(__file__).parent / "model_facts"
"""The config.json of published models, each with its source: plans need no weights."""

MODEL_TYPES: Final = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe")
"""`model_type`s whose weights are counted exactly."""

_MIXTURES: Final = ("qwen3_moe", "qwen3_vl_moe")


@final
@attrs.frozen(kw_only=True)
class ParameterCounts:
    """Weights by what they do. Every layer counted, biases with their matrix."""

    embedding: int
    head: int
    """0 where it is the embedding."""

    attention: int
    dense_mlp: int
    experts: int
    router: int
    norms: int

    vision: int
    """The vision tower of a model that sees, all of it."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(attrs.astuple(self))


@final
@attrs.frozen(kw_only=True)
class ModelFacts:
    """Sizes of a causal language model; names as in transformers' configurations."""

    name: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool

    attention_bias: bool
    """Whether query, key and value have one."""

    output_bias: bool
    """Whether the projection after attention has one."""

    mlp_bias: bool

    num_experts: int
    """Of a layer that has them; 0 for a dense model."""

    num_experts_per_tok: int
    moe_intermediate_size: int

    num_sparse_layers: int
    """Layers with experts in place of the dense part."""

    vision_weights: int
    """Weights of the vision tower; 0 for a model that does not see."""

    config: Mapping[str, object] = attrs.field(repr=False, eq=False)
    """All of config.json."""

    @property
    def text_config(self) -> Mapping[str, object]:
        """What config.json says of the language model."""
        text = self.config.get("text_config", self.config)
        assert isinstance(text, Mapping)  # noqa: S101  # `facts_of` has looked
        return text

    @property
    def has_experts(self) -> bool:
        """Whether any layer has them."""
        return self.num_sparse_layers > 0

    @property
    def query_size(self) -> int:
        """Entries of all query heads of a token."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Entries of all key heads of a token, and of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def counts(self) -> ParameterCounts:
        """Exact, by kind; compared with transformers' models in the tests."""
        hidden, layers = self.hidden_size, self.num_hidden_layers
        attention = 2 * hidden * (self.query_size + self.key_value_size)
        if self.attention_bias:
            attention += self.query_size + 2 * self.key_value_size
        if self.output_bias:
            attention += hidden
        mlp = 3 * hidden * self.intermediate_size
        if self.mlp_bias:
            mlp += 2 * self.intermediate_size + hidden
        per_head = 2 * self.head_dim if self.model_type.startswith("qwen3") else 0
        embedding = self.vocab_size * hidden
        return ParameterCounts(
            embedding=embedding,
            head=0 if self.tie_word_embeddings else embedding,
            attention=layers * attention,
            dense_mlp=(layers - self.num_sparse_layers) * mlp,
            experts=self.num_sparse_layers
            * self.num_experts
            * 3
            * hidden
            * self.moe_intermediate_size,
            router=self.num_sparse_layers * self.num_experts * hidden,
            norms=layers * (2 * hidden + per_head) + hidden,
            vision=self.vision_weights,
        )

    @property
    def active_experts(self) -> int:
        """Weights of the experts that one token goes through."""
        if not self.has_experts:
            return 0
        return self.counts.experts * self.num_experts_per_tok // self.num_experts

    @property
    def active(self) -> int:
        """Weights that one token of text meets."""
        counts = self.counts
        return counts.total - counts.vision - counts.experts + self.active_experts

    @property
    def multiplied_in_layers(self) -> int:
        """Weights of the layers that one token is multiplied with."""
        counts = self.counts
        return counts.attention + counts.dense_mlp + counts.router + self.active_experts

    @property
    def block(self) -> int:
        """Weights of the largest layer, its experts included."""
        counts = self.counts
        rest = counts.attention // self.num_hidden_layers
        dense_layers = self.num_hidden_layers - self.num_sparse_layers
        dense = counts.dense_mlp // dense_layers if dense_layers else 0
        sparse = (counts.experts + counts.router) // max(1, self.num_sparse_layers)
        return rest + max(dense, sparse) + counts.norms // self.num_hidden_layers

    def kv_bytes_per_token(self, *, tensor_parallel_size: int, element_bytes: int) -> int:
        """Of one device's key-value cache; heads that are fewer than the devices are repeated."""
        heads = -(-self.num_key_value_heads // tensor_parallel_size)
        return 2 * self.num_hidden_layers * heads * self.head_dim * element_bytes

    def write_config(self, folder: Path) -> None:
        """Its config.json, for what reads one."""
        text = json.dumps(dict(self.config))
        (folder / "config.json").write_text(text, encoding="utf-8")


def published_models() -> tuple[str, ...]:
    """Names of the models whose facts are in this folder."""
    return tuple(sorted(path.stem for path in PUBLISHED.glob("*.json")))


def read_model(name: str) -> ModelFacts:
    """Read a model's facts; loads nothing.

    Args:
        name: a Hugging Face folder, its config.json, or a published model such as "Qwen/Qwen3-8B".

    Raises:
        FileNotFoundError: if it is neither.
        ValueError: for a file that is no config.json, a kind of model that is not known here, or
            sizes that are missing or make no sense.
    """
    path = Path(name)
    short = name.rsplit("/", maxsplit=1)[-1].lower()
    if (path / "config.json").is_file():
        return parse_model((path / "config.json").resolve(), name=path.resolve().name)
    if path.is_file():
        return parse_model(path.resolve(), name=path.resolve().parent.name)
    if short in published_models():
        return parse_model(PUBLISHED / f"{short}.json", name=short)
    message = (
        f"{name}: expected a folder with a config.json, or one of {', '.join(published_models())}"
    )
    raise FileNotFoundError(message)


def parse_model(path: Path, *, name: str) -> ModelFacts:
    """Read one file; see `read_model`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        message = f"{path}: expected JSON, as in a Hugging Face folder: {error}"
        raise ValueError(message) from error
    if not isinstance(found, dict):
        message = f"{path}: expected a table of settings, got {type(found).__name__}"
        raise ValueError(message)  # noqa: TRY004  # the file is wrong, not the call
    if path.parent == PUBLISHED:
        return facts_of(found["config"], name=found["name"], where=str(path))
    return facts_of(found, name=name, where=str(path))


def _size(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        message = f"{where}: expected {key}, a whole number of at least 1, got {value!r}"
        raise ValueError(message)
    return value


def _part(config: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = config.get(key)
    if not isinstance(value, Mapping):
        message = f"{where}: expected {key}, a table, got {value!r}"
        raise ValueError(message)  # noqa: TRY004  # the file is wrong, not the call
    return value


def vision_weights(vision: Mapping[str, Any], where: str) -> int:
    """Weights of Qwen3-VL's vision tower, with the parts that hand its tokens on."""
    hidden, inner, depth, out, places, colours, patch, frames, merge = (
        _size(vision, key, where)
        for key in (
            *("hidden_size", "intermediate_size", "depth", "out_hidden_size"),
            *("num_position_embeddings", "in_channels", "patch_size", "temporal_patch_size"),
            "spatial_merge_size",
        )
    )
    block = 4 * hidden * hidden + 4 * hidden + 2 * hidden * inner + inner + hidden + 4 * hidden
    merged = merge * merge * hidden
    merger = merged * merged + merged + merged * out + out
    deep = vision.get("deepstack_visual_indexes")
    if not isinstance(deep, list | tuple):
        message = f"{where}: expected deepstack_visual_indexes, a list of layers, got {deep!r}"
        raise ValueError(message)  # noqa: TRY004  # the file is wrong, not the call
    return (
        depth * block
        + hidden * (colours * frames * patch * patch + 1)
        + places * hidden
        + (merger + 2 * hidden)
        + len(deep) * (merger + 2 * merged)
    )


def facts_of(whole: Mapping[str, Any], *, name: str, where: str) -> ModelFacts:
    """The facts of a config.json's content.

    Raises:
        ValueError: as `read_model` does, with `where`.
    """
    model_type = whole.get("model_type")
    sees = model_type in ("qwen3_vl", "qwen3_vl_moe")
    config = _part(whole, "text_config", where) if sees else whole

    def size(key: str, default: int | None = None) -> int:
        return _size(config, key, where, default)

    if model_type not in MODEL_TYPES:
        message = (
            f"{where}: the weights of model_type {model_type!r} cannot be counted here; known: "
            f"{', '.join(MODEL_TYPES)}"
        )
        raise ValueError(message)
    layers, heads = size("num_hidden_layers"), size("num_attention_heads")
    sparse = _num_sparse_layers(config, layers, where) if model_type in _MIXTURES else 0
    has_bias = bool(config.get("attention_bias", False))
    # transformers 5 writes the second name, the published folders have the first
    experts_key = "num_experts" if "num_experts" in config else "num_local_experts"
    experts = size(experts_key) if sparse else 0
    active = size("num_experts_per_tok") if sparse else 0
    if active > experts:
        message = f"{where}: num_experts_per_tok {active} is more than {experts_key} {experts}"
        raise ValueError(message)
    return ModelFacts(
        name=name,
        model_type=model_type,
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=size("num_key_value_heads", heads),
        head_dim=size(
            "head_dim", None if model_type.startswith("qwen3") else size("hidden_size") // heads
        ),
        tie_word_embeddings=bool(whole.get("tie_word_embeddings", False)),
        attention_bias=has_bias or model_type == "qwen2",
        output_bias=has_bias and model_type != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)) and model_type == "llama",
        num_experts=experts,
        num_experts_per_tok=active,
        moe_intermediate_size=size("moe_intermediate_size") if sparse else 0,
        num_sparse_layers=sparse,
        vision_weights=vision_weights(_part(whole, "vision_config", where), where) if sees else 0,
        config=dict(whole),
    )


def _num_sparse_layers(config: Mapping[str, Any], num_layers: int, where: str) -> int:
    step = config.get("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(step, int) or step < 1 or not isinstance(dense, list):
        message = (
            f"{where}: expected decoder_sparse_step, a whole number of at least 1, and "
            f"mlp_only_layers, a list of layers, got {step!r} and {dense!r}"
        )
        raise ValueError(message)
    return sum((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers))
