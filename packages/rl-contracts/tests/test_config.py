"""The strict loader: values with origins, or every problem at once."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

import attrs
import pytest

from rl_contracts import ConfigError, effective_toml, load_config, settings_help


@attrs.frozen(kw_only=True)
class Clip:
    """A loss."""

    kind: ClassVar[str] = "clip"

    clip_low: float = attrs.field(default=0.2, validator=attrs.validators.gt(0.0))
    """Lower clip."""


@attrs.frozen(kw_only=True)
class Plain:
    """Another loss."""

    kind: ClassVar[str] = "plain"


@attrs.frozen(kw_only=True)
class Axes:
    """A value with a text form of its own."""

    sizes: tuple[tuple[str, int], ...] = ()

    @classmethod
    def from_config(cls, value: object) -> "Axes":
        if not isinstance(value, dict):
            raise TypeError(f"expected a table of axis sizes, got {value!r}")
        return cls(sizes=tuple(sorted(value.items())))

    def to_config(self) -> dict[str, int]:
        return dict(self.sizes)


@attrs.frozen(kw_only=True)
class Optim:
    """An optimizer."""

    lr: float
    """Learning rate, per step."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the moments."""

    max_grad_norm: float | None = 1.0
    """Clipping; none for off."""


@attrs.frozen(kw_only=True)
class Run:
    """A run."""

    group_size: int = attrs.field()
    """Samples per prompt."""

    optim: Optim
    """The optimizer."""

    loss: Clip | Plain = attrs.field(factory=Clip)
    """The loss."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward pass."""

    model: Path = Path("model")
    """Model folder."""

    prefix_caching: bool | None = None
    """Three-valued."""

    stop_ids: tuple[int, ...] = ()
    """Stop tokens."""

    axes: Axes = Axes()
    """Extra axes."""

    engine_args: Mapping[str, object] = attrs.field(factory=dict)
    """Anything else."""

    @group_size.validator
    def _check(self, _: object, value: int) -> None:
        if value < 2:
            raise ValueError(f"expected a group of at least 2, got {value}")


def problems(*overrides: str, file: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(Run, file=file, overrides=overrides)
    return [str(problem) for problem in caught.value.problems]


def test_file_and_overrides_fill_the_class(tmp_path: Path) -> None:
    """An override wins over the file, which wins over the default; each says who set it."""
    file = tmp_path / "run.toml"
    file.write_text('group_size = 4\nmodel = "a/b"\n[optim]\nlr = 1\nbetas = [0.5, 0.6]\n')
    loaded = load_config(
        Run,
        file=file,
        overrides=["optim.lr=3e-5", "loss.kind=clip", "loss.clip_low=0.1", "axes.ep=8"],
    )
    assert loaded.value == Run(
        group_size=4,
        model=Path("a/b"),
        optim=Optim(lr=3e-5, betas=(0.5, 0.6)),
        loss=Clip(clip_low=0.1),
        axes=Axes(sizes=(("ep", 8),)),
    )
    assert str(loaded.origin("group_size")) == f"file {file}"
    assert loaded.origin("optim.lr").detail == "optim.lr=3e-5"
    assert str(loaded.origin("loss.clip_low")) == "command line"
    assert str(loaded.origin("dtype")) == "default"


def test_json_and_yaml_are_read_like_toml(tmp_path: Path) -> None:
    """The three formats give one configuration; YAML reads 1e-6 as a number."""
    (tmp_path / "run.toml").write_text("group_size = 4\n[optim]\nlr = 1e-6\n")
    (tmp_path / "run.json").write_text('{"group_size": 4, "optim": {"lr": 1e-6}}')
    (tmp_path / "run.yaml").write_text("group_size: 4\noptim:\n  lr: 1e-6\n")
    values = [load_config(Run, file=path).value for path in sorted(tmp_path.iterdir())]
    assert values == [Run(group_size=4, optim=Optim(lr=1e-6))] * 3


def test_nothing_is_converted_silently() -> None:
    """4.7 is no int, "false" is no bool, "8" is no int, True is no int, text is no list."""
    found = problems(
        "group_size=4.7",
        "optim.lr=true",
        'prefix_caching="false"',
        "stop_ids=abc",
        'optim.betas=["1", 2]',
        "engine_args=3",
        "axes=8",
    )
    assert sorted(found) == [
        "axes: expected a table of axis sizes, got 8  [command line]",
        "engine_args: expected a table, got 3 (int)  [command line]",
        "group_size: expected int, got 4.7 (float)  [command line]",
        "optim.betas: expected float, got '1' (str)  [command line]",
        "optim.lr: expected float, got True (bool)  [command line]",
        "prefix_caching: expected bool, got 'false' (str)  [command line]",
        "stop_ids: expected a list, got 'abc' (str)  [command line]",
    ]


def test_unknown_keys_name_the_nearest(tmp_path: Path) -> None:
    """An unknown key is refused with the nearest name, also when it stands elsewhere."""
    file = tmp_path / "run.toml"
    file.write_text("group_sise = 4\nlr = 1.0\nzzz = 1\n[optim]\nlr = 1.0\nbeta = 1\n")
    assert problems(file=file) == [
        f"group_sise: unknown setting; did you mean group_size?  [file {file}]",
        f"lr: unknown setting; did you mean optim.lr?  [file {file}]",
        (
            "zzz: unknown setting; known here: axes, dtype, engine_args, group_size, loss, model, "
            f"optim, prefix_caching, stop_ids  [file {file}]"
        ),
        "group_size: required setting is missing",
        f"optim.beta: unknown setting; did you mean optim.betas?  [file {file}]",
    ]


def test_validators_keep_their_words() -> None:
    """A class's own refusal arrives with its path."""
    assert problems("group_size=1", "optim.lr=1.0", "loss.kind=clip", "loss.clip_low=-1") == [
        "group_size: expected a group of at least 2, got 1  [command line]",
        "loss.clip_low: 'clip_low' must be > 0.0: -1.0  [command line]",
    ]


def test_choices_are_listed() -> None:
    """A wrong literal or kind is answered with the right ones."""
    assert problems("group_size=2", "optim.lr=1", "dtype=bfloat61", "loss.kind=gspo") == [
        "loss: expected `kind` to be one of clip, plain; got 'gspo'  [command line]",
        (
            "dtype: expected one of 'float32', 'bfloat16', got 'bfloat61'; "
            "did you mean 'bfloat16'?  [command line]"
        ),
    ]


def test_a_setting_of_the_other_kind_is_refused() -> None:
    """A union member does not take its sibling's settings."""
    assert problems("group_size=2", "optim.lr=1", "loss.kind=plain", "loss.clip_low=0.1") == [
        "loss.clip_low: unknown setting of kind=plain; there are none here  [command line]"
    ]


@attrs.frozen(kw_only=True)
class Outer:
    """A class that gives its parts other defaults than they have themselves."""

    run: Run = attrs.field(
        factory=lambda: Run(group_size=8, optim=Optim(lr=1e-5), loss=Clip(clip_low=0.5))
    )
    """The part."""


def test_an_override_keeps_the_rest_of_a_default() -> None:
    """Setting one value of a nested default leaves its siblings, also inside a union."""
    loaded = load_config(Outer, overrides=["run.optim.betas=[0.1, 0.2]", "run.dtype=bfloat16"])
    assert loaded.value.run == Run(
        group_size=8,
        optim=Optim(lr=1e-5, betas=(0.1, 0.2)),
        loss=Clip(clip_low=0.5),
        dtype="bfloat16",
    )
    assert load_config(Outer, overrides=["run.loss.clip_low=0.1"]).value.run.loss == Clip(
        clip_low=0.1
    )
    assert load_config(Outer, overrides=["run.loss.kind=plain"]).value.run.loss == Plain()
    assert load_config(Outer, overrides=[]).value == Outer()


def test_a_configuration_can_be_the_default(tmp_path: Path) -> None:
    """A recipe's values stand where neither file nor override sets one, in unions and tables."""
    recipe = Run(group_size=16, optim=Optim(lr=0.5), loss=Clip(clip_low=0.3))
    file = tmp_path / "run.toml"
    file.write_text("[loss]\nclip_low = 0.1\n")
    loaded = load_config(Run, file=file, overrides=["optim.betas=[0.1, 0.2]"], defaults=recipe)
    assert loaded.value == attrs.evolve(
        recipe, optim=Optim(lr=0.5, betas=(0.1, 0.2)), loss=Clip(clip_low=0.1)
    )
    assert str(loaded.origin("optim.lr")) == "default"
    assert load_config(Run, defaults=recipe).value == recipe
    other = load_config(Run, overrides=["loss.kind=plain"], defaults=recipe).value
    assert other == attrs.evolve(recipe, loss=Plain())
    assert "  group_size  (int; 16)" in settings_help(Run, defaults=recipe)


def test_help_shows_the_defaults_of_the_outer_class() -> None:
    """A nested setting's default is what it will be, not what its own class says."""
    text = settings_help(Outer)
    assert "  run.group_size  (int; 8)" in text
    assert "  run.loss.clip_low  (float; 0.5, with kind=clip)" in text


def test_choosing_another_kind_forgets_the_files_settings(tmp_path: Path) -> None:
    """An override of a kind begins that table afresh; the file's settings were the other kind's."""
    file = tmp_path / "run.toml"
    file.write_text(effective_toml(load_config(Run, overrides=["group_size=2", "optim.lr=1"])))
    loaded = load_config(Run, file=file, overrides=["loss.kind=plain"])
    assert loaded.value.loss == Plain()
    assert str(loaded.origin("loss.kind")) == "command line"


def test_an_override_is_one_value() -> None:
    """Text with lines of its own is a string, not a value and something that is dropped."""
    assert problems("group_size=3\nfoo = 4", "optim.lr=1") == [
        "group_size: expected int, got '3\\nfoo = 4' (str)  [command line]"
    ]


def test_broken_overrides_and_files_are_named(tmp_path: Path) -> None:
    """Text that is no override, a table over a value, and broken files say what they are."""
    assert problems("group_size") == [
        "expected an override of the form path.to.setting=value, got 'group_size'  [command line]"
    ]
    assert problems("group_size=2", "group_size.x=1") == [
        "group_size.x: group_size is set to 2 and has no settings below it  [command line]"
    ]
    broken = tmp_path / "run.toml"
    broken.write_text("a = = 1")
    assert "is not valid TOML" in problems(file=broken)[0]
    assert "No such file" in problems(file=tmp_path / "absent.toml")[0]
    assert "expected a .toml, .json or .yaml file" in problems(file=tmp_path / "run.ini")[0]
    (tmp_path / "list.json").write_text("[1]")
    assert "to hold a table of settings, got [1] (list)" in problems(file=tmp_path / "list.json")[0]


def test_none_has_a_word() -> None:
    """`none` switches an optional setting off, and is refused where there is no None."""
    loaded = load_config(Run, overrides=["group_size=2", "optim.lr=1", "optim.max_grad_norm=none"])
    assert loaded.value.optim.max_grad_norm is None
    assert problems("group_size=none", "optim.lr=1") == [
        "group_size: expected int, got 'none' (str)  [command line]"
    ]


def test_effective_text_reads_back(tmp_path: Path) -> None:
    """The effective configuration is TOML that loads as the same configuration."""
    loaded = load_config(
        Run,
        overrides=[
            "group_size=2",
            "optim.lr=3e-5",
            "optim.max_grad_norm=none",
            "axes.ep=8",
            "engine_args.a.b=[1, 2]",
            'model=has "quotes" and \\ slashes',
        ],
    )
    text = effective_toml(loaded, derived={"world_size": (2, "one per core")})
    file = tmp_path / "effective_config.toml"
    file.write_text(text)
    assert load_config(Run, file=file).value == loaded.value
    assert "group_size = 2  # command line; read by" in text
    assert 'dtype = "float32"  # default; read by ' in text
    assert "# world_size = 2  (one per core)" in text
    assert 'kind = "clip"' in text


@attrs.frozen(kw_only=True)
class Several:
    """Tuples and tables of configurations."""

    losses: tuple[Clip | Plain, ...] = ()
    """Any number of them."""

    optims: tuple[Optim, ...] = ()
    """Of one class, which needs no kind."""

    by_name: Mapping[str, Optim] = attrs.field(factory=dict)
    """Under names."""


def test_tuples_of_configurations_are_written_and_read_back(tmp_path: Path) -> None:
    """Each as one table, with its kind where there is a choice."""
    given = Several(losses=(Clip(clip_low=0.3), Plain()), optims=(Optim(lr=0.5),))
    text = effective_toml(load_config(Several, defaults=given))
    assert '[{ kind = "clip", clip_low = 0.3 }, { kind = "plain" }]' in text
    file = tmp_path / "several.toml"
    file.write_text(text)
    assert load_config(Several, file=file).value == given
    chosen = load_config(Several, overrides=['losses=[{kind="plain"}]']).value
    assert chosen.losses == (Plain(),)


def test_problems_in_a_table_of_names_have_their_whole_path() -> None:
    """The name is part of the path."""
    with pytest.raises(ConfigError) as caught:
        load_config(Several, overrides=["by_name.a.lr='fast'", "by_name.b.lr=1.0"])
    assert [str(problem) for problem in caught.value.problems] == [
        "by_name.a.lr: expected float, got 'fast' (str)  [command line]"
    ]


def test_help_shows_every_setting() -> None:
    """The help names each setting with type, default and docstring."""
    text = settings_help(Run)
    assert "  optim.lr  (float; required)\n      Learning rate, per step." in text
    assert '  dtype  (float32 | bfloat16; "float32")' in text
    assert '  loss.kind  (clip | plain; "clip")' in text
    assert "  loss.clip_low  (float; 0.2, with kind=clip)" in text
