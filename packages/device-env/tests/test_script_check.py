"""Judging launch scripts line by line."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from device_env import Judge, LocatedFinding, RunFacts, ScriptError, check_script
from device_env.cli import main
from device_env.shell_script import follow_script

SCRIPTS = Path(__file__).parent / "scripts"
ASCEND = {"vllm": "0.23.0", "vllm-ascend": "0.23.0", "torch-npu": "2.10.0", "ray": "2.60.0"}
NPU = Judge(versions=ASCEND, device_kind="npu")
VLLM = Judge(versions={"vllm": "0.32.0"})


def rows(found: list[LocatedFinding]) -> list[tuple[int, str, str]]:
    """Line, level and variable of each finding."""
    return [(at.line, at.finding.level, at.finding.variable) for at in found]


def exported(text: str, environ: Mapping[str, str] | None = None) -> list[dict[str, str | None]]:
    """The environments that a script gives to processes, without those of the caller."""
    followed = follow_script(text, environ)
    return [
        {name: value.text for name, value in launch.environ.items()} for launch in followed.launches
    ]


def test_the_five_dead_variables_of_a_gspo_script() -> None:
    """On a script like verl's for GSPO on NPUs the five dead variables are found, and only they.

    Silent failure 22: examples/ascend_extras/gspo_trainer/run_qwen3_32b_fsdp.sh in verl.
    """
    found = check_script((SCRIPTS / "gspo_npu.sh").read_text(), NPU)
    assert rows(found) == [
        (11, "warning", "VLLM_USE_V1"),
        (12, "warning", "VLLM_ATTENTION_BACKEND"),
        (13, "warning", "VLLM_ASCEND_ENABLE_FLASHCOMM"),
        (14, "warning", "VLLM_ASCEND_ENABLE_PREFETCH_MLP"),
        (15, "warning", "VLLM_ASCEND_ENABLE_DENSE_OPTIMIZE"),
    ]


def test_no_variable_that_works_is_called_dead() -> None:
    """A script whose variables are all read gets no finding but for what was not seen."""
    found = check_script((SCRIPTS / "megatron_npu.sh").read_text(), NPU)
    assert rows(found) == [(3, "note", "script")]


def test_a_script_for_two_devices_is_followed_for_the_one_that_is_named() -> None:
    """With DEVICE given, only that arm of the script counts; without it, every arm does."""
    text = (SCRIPTS / "moe_two_devices.sh").read_text()
    npu = [
        (14, "warning", "VLLM_USE_V1"),
        (15, "error", "VLLM_VERSION"),
        (19, "warning", "CUDA_DEVICE_MAX_CONNECTIONS"),
    ]
    assert rows(check_script(text, NPU)) == npu
    assert rows(check_script(text, NPU, environ={"DEVICE": "npu"})) == npu
    assert check_script(text, NPU, environ={"DEVICE": "gpu"}) == []


def test_arms_that_exclude_each_other_are_not_mixed() -> None:
    """Two variables that undo each other are no error in different arms, and one in the same."""
    apart = (
        'if [ "$MODE" = fast ]; then\n  export HCCL_OP_EXPANSION_MODE=AIV\n'
        "else\n  export HCCL_EXEC_TIMEOUT=3600\nfi\npython3 train.py\n"
    )
    assert check_script(apart, NPU) == []
    together = apart.replace("else\n", "")
    assert rows(check_script(together, NPU)) == [(3, "error", "HCCL_EXEC_TIMEOUT")]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("export VLLM_USE_V1=1", 1),
        ("\n\nVLLM_USE_V1=1 python3 train.py", 3),
        ("nohup env OMP_NUM_THREADS=1 VLLM_USE_V1=1 python3 train.py &", 1),
        ("export OMP_NUM_THREADS=1 \\\n  VLLM_USE_V1=1\n", 2),
        ("VLLM_USE_V1=1\nexport VLLM_USE_V1\n", 1),
        ("set -a\nVLLM_USE_V1=1\n", 2),
        ("declare -x VLLM_USE_V1=1", 1),
        ("(\n  export VLLM_USE_V1=1\n  python3 train.py\n)", 2),
        ("setup() {\n  export VLLM_USE_V1=1\n}\nsetup\n", 2),
        ("import_torch_npu && export VLLM_USE_V1=1", 1),
        ("for n in 1 2; do\n  VLLM_USE_V1=$n python3 train.py\ndone", 2),
        ("export VLLM_USE_V1=$(nproc)", 1),
        ("V=1\nexport VLLM_USE_V1=${V:-0}", 2),
        (
            """ray job submit --runtime-env-json='{\n "env_vars": {\n "VLLM_USE_V1": "1"}}' -- x""",
            3,
        ),
        ("exec > >(tee log) 2>&1\nexport VLLM_USE_V1=1", 2),
        (': "${VLLM_USE_V1:=1}"\nexport VLLM_USE_V1', 1),
        ("export VLLM_USE_V1", 1),
        ("n=VLLM_USE_V1\nexport $n=1", 2),
        ("for n in A VLLM_USE_V1; do\n  export $n=1\ndone", 2),
        ('N=(A VLLM_USE_V1)\nfor n in "${N[@]}"; do export $n=1; done', 2),
        ('A=(B=1\n VLLM_USE_V1=1)\nenv "${A[@]}" python3 train.py', 2),
        ("bash -c '\nexport VLLM_USE_V1=1; python3 train.py'", 2),
        ('srun bash -lc "cd $DIR\nexport VLLM_USE_V1=1"', 2),
        ("timeout -k 5 10 env VLLM_USE_V1=1 python3 train.py", 1),
        ("bash <<'END'\nexport VLLM_USE_V1=1\nEND", 2),
        ("eval 'export VLLM_USE_V1=1'", 1),
        ("x=$(python3 - <<END\nit's\nEND\n)\nexport VLLM_USE_V1=1", 5),
        ("export VLLM_USE_V1=1 &\nwait", 1),
        ("case x in x) true;& y) export VLLM_USE_V1=1;; esac", 1),
        ("for ((i = 0; i < 2; i++)) { export VLLM_USE_V1=1; }", 1),
        ("python3 train.py \\\n +ray_kwargs.ray_init.runtime_env.env_vars.VLLM_USE_V1=1", 2),
        ('R=(\n \'++a.runtime_env.env_vars.VLLM_USE_V1="1"\'\n)\npython3 t.py "${R[@]}"', 2),
        ("python3 t.py a.runtime_env.env_vars=\"{A: '1', VLLM_USE_V1: '1'}\"", 1),
        (
            (
                'J="{\n\\"env_vars\\": {\\"A\\": \\"$X\\",\n\\"VLLM_USE_V1\\": \\"1\\"}}"\n'
                'ray job submit --runtime-env-json="$J" -- x'
            ),
            3,
        ),
    ],
)
def test_every_way_to_set_a_variable_is_seen(text: str, line: int) -> None:
    """However a script puts a dead variable into an environment, its line is named."""
    assert rows(check_script(text, VLLM)) == [(line, "warning", "VLLM_USE_V1")]


@pytest.mark.parametrize(
    "text",
    [
        "# export VLLM_USE_V1=1",
        "echo export VLLM_USE_V1=1",
        "echo 'export VLLM_USE_V1=1'",
        "cat > run.sh <<EOF\nexport VLLM_USE_V1=1\nEOF\n",
        "ARGS=(VLLM_USE_V1=1)",
        "[ -n x ] || export VLLM_USE_V1=1",
        "exit 1\nexport VLLM_USE_V1=1",
        "if false; then export VLLM_USE_V1=1; fi",
        "set -- -a\nVLLM_USE_V1=${X}\necho $VLLM_USE_V1",
        "export -f VLLM_USE_V1",
        "python3 t.py ~a.env_vars.VLLM_USE_V1=1",
    ],
)
def test_what_sets_nothing_is_left_alone(text: str) -> None:
    """Comments, arguments, quoted text, here-documents and dead code set no variable."""
    assert check_script(text, VLLM) == []


def test_values_are_expanded_where_they_are_static() -> None:
    """Earlier variables, defaults and the caller's environment are put in; the rest is unknown."""
    text = (
        "BASE=/data\nSUB=${SUB:-runs}\n"
        "export A=\"$BASE/$SUB\" B='$BASE' C=$HOME/x D=$(date) E=${X:+set} F=$((1+1))\n"
        "export G=a\\\nb\nexport G+=c\n"
    )
    (environ,) = exported(text)
    assert environ == {
        "A": "/data/runs",
        "B": "$BASE",
        "C": None,
        "D": None,
        "E": "",
        "F": None,
        "G": "abc",
    }
    (given,) = exported(text, {"SUB": "other", "X": "1", "HOME": "/root"})
    assert (given["A"], given["C"], given["E"]) == ("/data/other", "/root/x", "set")


def test_values_that_are_unknown_are_not_judged_and_their_names_are() -> None:
    """A computed timeout is no error, a literal one outside its domain is."""
    assert check_script("export HCCL_CONNECT_TIMEOUT=$(wait_time)", NPU) == []
    found = check_script("export HCCL_CONNECT_TIMEOUT=60", NPU)
    assert rows(found) == [(1, "error", "HCCL_CONNECT_TIMEOUT")]


def test_a_variable_that_is_computed_is_not_taken_for_unset() -> None:
    """The rule that asks for VLLM_ASCEND_ENABLE_NZ=0 is silent where its value is unknown."""
    judge = Judge(versions=ASCEND, device_kind="npu", facts=RunFacts(online_weight_update=True))
    assert check_script("export VLLM_ASCEND_ENABLE_NZ=$(nz)", judge) == []
    assert rows(check_script("export VLLM_ASCEND_ENABLE_NZ=1", judge)) == [
        (1, "error", "VLLM_ASCEND_ENABLE_NZ")
    ]
    assert rows(check_script("true\npython3 train.py\n", judge)) == [
        (2, "error", "VLLM_ASCEND_ENABLE_NZ")
    ]


def test_a_variable_that_is_not_exported_is_named() -> None:
    """An assignment that no process sees is inert, unless the script uses it itself."""
    found = check_script("OMP_NUM_THREADS=4\npython3 train.py\n", VLLM)
    assert rows(found) == [(1, "warning", "OMP_NUM_THREADS")]
    assert found[0].finding.message == "assigned but not exported: no process sees it"
    used = "OMP_NUM_THREADS=4\npython3 train.py --threads $OMP_NUM_THREADS\n"
    assert check_script(used, VLLM) == []
    tested = "OMP_NUM_THREADS=4\n[[ -v OMP_NUM_THREADS ]] && echo set\n"
    assert check_script(tested, VLLM) == []
    assert check_script("OMP_NUM_THREADS=4\n", VLLM, environ={"OMP_NUM_THREADS": "1"}) == []


def test_what_is_unset_again_does_not_count() -> None:
    """A rule looks at what is left at the end; `env -u` and `env -i` take away too."""
    text = (
        "export HCCL_OP_EXPANSION_MODE=AIV HCCL_EXEC_TIMEOUT=3600\n"
        "unset HCCL_OP_EXPANSION_MODE\npython3 train.py\n"
    )
    assert check_script(text, NPU) == []
    assert exported("export A=1 B=2\nenv -u A C=3 run\nenv -i D=4 run\n") == [
        {"B": "2", "C": "3"},
        {"D": "4"},
        {"A": "1", "B": "2"},
    ]


def test_an_environment_that_is_not_complete_yet_is_not_judged() -> None:
    """What runs before all exports, or leaves early, does not see what the run will see."""
    judge = Judge(versions=ASCEND, device_kind="npu", facts=RunFacts(online_weight_update=True))
    text = (
        'if [ "$1" = --help ]; then\n  exit 0\nfi\n'
        "date | cut -c1-4\nmkdir -p logs\n(cd logs && ls)\nls missing || exit 1\n"
        "export VLLM_ASCEND_ENABLE_NZ=0\npython3 train.py | tee log\n"
    )
    assert check_script(text, judge) == []
    assert check_script(text + "exit 0\n", judge) == []
    late = text.replace("export VLLM_ASCEND_ENABLE_NZ=0\n", "") + "exit $?\n"
    assert rows(check_script(late, judge)) == [(9, "error", "VLLM_ASCEND_ENABLE_NZ")]


def test_many_choices_are_followed_up_to_a_bound_that_is_told() -> None:
    """Where a script has more ways than are followed, that is a note, and no line is missed."""
    text = "".join(f"if test{n}; then export A{n}=1; fi\n" for n in range(8))
    found = check_script(text + "export VLLM_USE_V1=1\n", VLLM)
    assert rows(found) == [(1, "note", "script"), (9, "warning", "VLLM_USE_V1")]


def test_the_syntax_of_real_scripts_is_read() -> None:
    """Functions, loops, process substitution, tests with operators and here-strings are read."""
    text = r"""
log(){ echo -e "$*" >&2; }
clear() {
  local name
  while IFS='=' read -r name _; do
    case "${name}" in
      SLURM_*) unset "${name}" ;;
    esac
  done < <(env)
}
value() { sed -E 's#[/:.]#-#g; s/^-+//' <<<"${1}"; }
if [[ "${A}" -ne "${B}" && -z "${C}" ]]; then exit 1; fi
(exec 3<>/dev/tcp/"${host}"/"${port}") 2>/dev/null
[[ "${state}" =~ (FAILED|CANCELLED) ]] && { echo "ended: ${state}" >&2; exit 1; }
(( elapsed += 3 ))
out+=",${item}"
ID="$(sbatch \
  --job-name="${JOB}" "$@")"
for ((i = 0; i < 3; i++)); do echo $i; done
elapsed=${URL##*:}; arr=("a" "${arr[@]}")
cat <<-'END' | tee x 2>&1
	don't
	END
export LAST=1
"""
    assert {"LAST": "1"} in exported(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("export A='x", r"line 1: the quote ' is not closed"),
        ('\nexport A="x', r'line 2: the quote " is not closed'),
        ("if true; then\n  x", r"line 2: expected 'fi', got the end of the script"),
        ("cat <<EOF\nx", r"line 2: the here-document up to 'EOF' has no end"),
        ("a=$(b", r"line 1: the bracket \( is not closed"),
        ("x )", r"line 1: unexpected '\)'"),
        ("true && ;", r"line 1: unexpected ';'"),
    ],
)
def test_what_is_no_script_is_refused_with_its_line(text: str, message: str) -> None:
    """A file that a shell would refuse is refused here, with the line."""
    with pytest.raises(ScriptError, match=message):
        follow_script(text)


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.stem)
@pytest.mark.parametrize("device", ["npu", "gpu"])
def test_the_environment_is_that_of_bash(script: Path, device: str, tmp_path: Path) -> None:
    """What the follower says a script exports is what bash gives to the process it starts."""
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for name in ("python3", "uv"):
        (stubs / name).write_text(f"#!/bin/sh\nenv > {tmp_path}/seen\n")
        (stubs / name).chmod(0o755)
    (tmp_path / "logs").mkdir()
    text = script.read_text()
    runnable = tmp_path / "script.sh"
    runnable.write_text("".join(line + "\n" for line in text.splitlines() if "source" not in line))
    given = {"DEVICE": device, "HOME": str(tmp_path)}
    subprocess.run(
        ["bash", runnable],
        cwd=tmp_path,
        env={**given, "PATH": f"{stubs}:{os.environ['PATH']}"},
        check=True,
        capture_output=True,
        timeout=60,
    )
    seen = dict(line.partition("=")[::2] for line in (tmp_path / "seen").read_text().splitlines())
    *_, last = exported(text, given)
    shell_adds = {"PATH", "PWD", "OLDPWD", "SHLVL", "_"}
    assert {name: value for name, value in seen.items() if name not in shell_adds} == last


def test_check_of_a_script_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors make the exit status 1 and carry their line; warnings do so under --strict."""
    versions = ["--vllm", "0.23.0", "--vllm-ascend", "0.23.0", "--torch-npu", "2.10.0"]
    command = ["check", str(SCRIPTS / "moe_two_devices.sh"), *versions, "--device", "npu"]
    assert main([*command, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(row["line"], row["level"]) for row in found] == [
        (14, "warning"),
        (15, "error"),
        (19, "warning"),
    ]
    assert main([*command, "--with", "DEVICE=gpu"]) == 0
    assert "nothing found" in capsys.readouterr().out
    gspo = ["check", str(SCRIPTS / "gspo_npu.sh"), *versions]
    assert main(gspo) == 0
    assert "gspo_npu.sh:11: VLLM_USE_V1" in capsys.readouterr().out
    assert main([*gspo, "--strict"]) == 1
    assert main([*gspo, "--process-group-timeout", "1800"]) == 1
    assert "gives up after 1800 s, before HCCL_CONNECT_TIMEOUT=3600 s" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["check", "--with", "DEVICE=npu"]) == 2
    assert "--with says which way a SCRIPT goes, and none is given" in capsys.readouterr().err
    broken = tmp_path / "broken.sh"
    broken.write_text("if true\n")
    assert main(["check", str(broken)]) == 2
    assert "broken.sh: line 1: expected 'then'" in capsys.readouterr().err


DIFFERENCES = """
exec >/dev/null 2>&1; export A=1; show
: ${A:=1}; export A; B=$A show
export A=1 B=2; unset A; show
export A=1; unset -f A; show
export A=1; declare +x A; show
export A=1; export -n A; show
set -x -- -a; A=1; show
set -eo allexport; A=1; show
X="A=1 B=2"; export $X; show
X=A; B=2; export $X=1 "B=$B"; show
for v in A B; do export "$v"=1; done; show
for i in 1 2 3; do export A=$i; [ "$i" = 2 ] && break; done; show
f() { export A=$1 B=${2:-x}; }; f 1; f 2 y; show
f() { shift; export A=1 B=2; }; f 3; show
X=(A=1 B=2); X+=(C=3); env "${X[@]}" show
C=(env A=1 show); "${C[@]}"
env -i PATH="$PATH" A=1 show
env -uB -C / A=1 show
env -S "A=1 show"
nohup env A=1 show
timeout 10 nice -n 1 env A=1 show
A=1 bash -c 'export B=2; show'
bash -c "export A=\'1 2\'; exec show"
eval "export A=1"; show
case x in x) export A=1;;& *) export B=1;; esac; show
case ab in a?) export A=1;& b) export B=1;; esac; show
export A=~/x B="~/x" C=x:~/y; show
export A="${Z:-'x'}" B=${Z:-'x'}; show
X=HOME; export A=${!X}; show
export A=1 & wait; show
{ export A=1; } && show
printf -v A %s 1; export A; show
((A = 5)); let B=6; export A B; show
export A=$[1 + 2] B=$((1 << 2)); show
"""


@pytest.mark.parametrize("line", DIFFERENCES.strip().splitlines())
def test_one_line_does_what_bash_does(line: str, tmp_path: Path) -> None:
    """The environment in which bash runs `show` is one that the follower found, name by name.

    A value that the follower calls unknown counts as any.
    """
    stub = tmp_path / "show"
    stub.write_text(f"#!/bin/sh\nenv | grep '^[A-C]=' >> {tmp_path}/seen; exit 0\n")
    stub.chmod(0o755)
    (tmp_path / "seen").touch()
    path = f"{tmp_path}:/usr/local/bin:/usr/bin:/bin"
    subprocess.run(
        ["bash", "-c", line],
        cwd=tmp_path,
        env={"PATH": path, "HOME": "/home"},
        check=False,
        capture_output=True,
        timeout=60,
    )
    text = (tmp_path / "seen").read_text()
    seen = dict(row.partition("=")[::2] for row in text.splitlines())
    found = [
        {name: value for name, value in environ.items() if name in {"A", "B", "C"}}
        for environ in exported(line, {"HOME": "/home", "PATH": path})
    ]
    assert any(
        environ.keys() == seen.keys()
        and all(value is None or value == seen[name] for name, value in environ.items())
        for environ in found
    ), (seen, found)


def test_what_is_given_to_ray_workers_is_seen_together_with_the_rest() -> None:
    """A rule holds between an export and an override that both reach the workers."""
    text = (
        "export HCCL_OP_EXPANSION_MODE=AIV\n"
        "python3 t.py +ray_kwargs.ray_init.runtime_env.env_vars.HCCL_EXEC_TIMEOUT=\"'3600'\"\n"
    )
    assert rows(check_script(text, NPU)) == [(2, "error", "HCCL_EXEC_TIMEOUT")]


def test_names_that_a_list_gives_to_the_workers() -> None:
    """A script that hands variables on by name sets each of them where the list is used."""
    text = (
        "export HCCL_BUFFSIZE=610 VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE=1\n"
        "NAMES=(HCCL_BUFFSIZE)\nNAMES+=(VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE)\nRAY=()\n"
        'for name in "${NAMES[@]}"; do\n'
        '  RAY+=("+ray_kwargs.ray_init.runtime_env.env_vars.${name}=\\"${!name}\\"")\n'
        'done\npython3 t.py "${RAY[@]}" "$@"\n'
    )
    assert rows(check_script(text, NPU)) == [
        (1, "warning", "VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE"),
        (6, "warning", "VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE"),
    ]
    assert exported(text)[0]["HCCL_BUFFSIZE"] == "610"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('eval "$(conda shell.bash hook)"', "evaluates text, whose variables are not seen"),
        ("bash prepare.sh --all", "runs prepare.sh, whose variables are not seen"),
        ('source "$ROOT/env.sh"', "reads another script, whose variables are not seen"),
        ('bash -c "$COMMAND"', "runs text, whose variables are not seen"),
    ],
)
def test_what_cannot_be_seen_is_told(text: str, message: str) -> None:
    """Where a script runs what is not in it, that is a note, not silence."""
    (found,) = check_script(text, NPU)
    assert (found.finding.level, found.finding.message) == ("note", message)


def test_line_ends_and_marks_that_bash_takes_for_text() -> None:
    """CR LF and a byte order mark are errors, and the lines are still judged."""
    found = check_script("\ufeffexport VLLM_USE_V1=1\ntrue\r\n", VLLM)
    assert rows(found) == [
        (1, "error", "script"),
        (1, "warning", "VLLM_USE_V1"),
        (2, "error", "script"),
    ]
    assert "byte order mark" in found[0].finding.message
    assert "CR LF" in found[2].finding.message


@pytest.mark.parametrize(
    "text",
    [
        "if true; then\n" * 2000 + "true\n" + "fi\n" * 2000,
        'A="' + '$("' * 2000 + "x" + '")' * 2000 + '"',
        "a() { b; b; }\nb() { c; c; }\n"
        + "".join(f"f{n}() {{ f{n + 1}; f{n + 1}; }}\n" for n in range(30))
        + "f0\n",
    ],
)
def test_a_script_without_end_is_refused(text: str) -> None:
    """Nesting and calls that multiply end in an error, not in a crash or a wait."""
    with pytest.raises(ScriptError, match=r"nested deeper|expected at most 20000 commands"):
        follow_script(text)


def test_values_do_not_grow_without_end() -> None:
    """A value that doubles with every line is unknown from some length on."""
    (environ,) = exported(
        "A=x\n" + "A=$A$A\n" * 60 + "X=(a)\n" + 'X+=("${X[@]}")\n' * 60 + "export A\n"
    )
    assert environ == {"A": None}


def test_files_that_are_no_text_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Latin-1 comments do not matter, and JSON comes out for an empty file too."""
    script = tmp_path / "run.sh"
    script.write_bytes(b"# caf\xe9\nexport VLLM_USE_V1=1\r\n")
    assert main(["check", str(script), "--vllm", "0.32.0", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(row["line"], row["variable"]) for row in found] == [(2, "script"), (2, "VLLM_USE_V1")]
    script.write_bytes(b"")
    assert main(["check", str(script), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["check", str(tmp_path), "--json"]) == 2
    assert "Is a directory" in capsys.readouterr().err
