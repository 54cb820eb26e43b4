"""Commands are parsed from shell scripts as the shell would, without running anything."""

from __future__ import annotations

import pytest

from rlsdk.migration import shell


def words(script: str) -> list[tuple[str, ...]]:
    return [command.words for command in shell.commands(script, {"KNOWN": "3"})]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("a b=1 \\\n  c=2\n", [("a", "b=1", "c=2")]),
        ("a b=1 \\\r\n c=2", [("a", "b=1", "c=2")]),
        ("# a comment\nset -x\na # b\n", [("a",)]),
        ("N=8\na n=$N m=${N}0", [("a", "n=8", "m=80")]),
        ("export N=8 M=9; a n=$N m=$M", [("a", "n=8", "m=9")]),
        ("a n=$N", [("a", "n=${oc.env:N}")]),
        ('a n=${N:-4} m="$D/x"', [("a", "n=${oc.env:N,4}", "m=${oc.env:D}/x")]),
        ("a 'n=$N' \"m=\\$N\"", [("a", "n=$N", "m=$N")]),
        ("a x=['wandb'] y='[a, b]'", [("a", "x=[wandb]", "y=[a, b]")]),
        ("a b=1 2>&1 | tee log\n", [("a", "b=1"), ("tee", "log")]),
        ("a b=1 > out.txt 2> err.txt &", [("a", "b=1")]),
        ('A=(\n  x=1\n  y=$N  # why\n)\na "${A[@]}" z=2', [("a", "x=1", "y=${oc.env:N}", "z=2")]),
        ("A=(x=1)\nA+=(y=2)\na ${A[@]}", [("a", "x=1", "y=2")]),
        ('a "$@" b=1', [("a", "b=1")]),
        ("CUDA_VISIBLE_DEVICES=0 a b=1", [("a", "b=1")]),
        ("a b='it''s' c=\"two words\"", [("a", "b=its", "c=two words")]),
        ("cd x && a b=1", [("cd", "x"), ("a", "b=1")]),
        ("# a x=1 \\\n# y=2 \\\na b=1", [("a", "b=1")]),
        ("a b=1 \\\n  # c=2 \\\n  d=3\n", [("a", "b=1")]),
        ('a "b=1\\\n2" c=$((1 + \\\n 2))', [("a", "b=12", "c=3")]),
        ("(cd x; a b=1)", [("cd", "x"), ("a", "b=1")]),
        ('M=${M:-"$D/m"}\na m=$M', [("a", "m=${oc.env:M,${oc.env:D}/m}")]),
        ("I=${I:-Q/q}; M=${M:-${HOME}/${I}}; a m=$M", [("a", "m=${oc.env:M,${oc.env:HOME}/${oc.env:I,Q/q}}")]),
        ('a "m=${M:-"x y"}"', [("a", "m=${oc.env:M,x y}")]),
        ("a m=${M:-'[1, 2]'}", [("a", "m=${oc.env:M,'[1, 2]'}")]),
        ("P=$((1024 * 2)); a l=$((P + $P / 3)) m=$(( (P - 1) % 4 ))", [("a", "l=2730", "m=3")]),
        ("N=${N:-2}; a g=$((N * 8)) h=$((KNOWN*8))", [("a", "g=16", "h=24")]),
        ("a g=$((UNKNOWN * 8)) h=$((1 / 0))", [("a", "g=$((UNKNOWN * 8))", "h=$((1 / 0))")]),
        ("d.f=${oc.env:D, x}", [("d.f=${oc.env:D, x}",)]),
        ("a p=$(pwd)/x", [("a", "p=${oc.env:PWD}/x")]),
        ('M=Q/Qwen; a n="run-$(basename "$M")" d=$(dirname $M)', [("a", "n=run-Qwen", "d=Q")]),
        ("M=${M:-Q/Qwen}; a n=$(basename ${M,,})", [("a", "n=qwen")]),
        (
            "M=a/b/m.tar.gz; a ${M##*/} ${M#*/} ${M%.*} ${M%%.*}",
            [("a", "m.tar.gz", "b/m.tar.gz", "a/b/m.tar", "a/b/m")],
        ),
        ('X="b=1 c=2"; a $X', [("a", "b=1", "c=2")]),
        ("X=$(cd x && ls)/y; a b $X", [("a", "b", "$(cd x && ls)/y")]),
        ('X="b=1 c=2"; a "$X"', [("a", "b=1 c=2")]),
        (
            "case $G in\n  h100) N=8 ;;\nesac\na n=$N",
            [("a", "n=8")],
        ),
        ("N=${N:-}; n=${N:-8}; a n=$n m=${N:-4}", [("a", "n=${oc.env:N,8}", "m=${oc.env:N,4}")]),
        ("X=; a n=${X:-2} m=${X-3}", [("a", "n=2", "m=")]),
        (': "${N:=8}"; a n=$N', [(":", "${oc.env:N,8}"), ("a", "n=${oc.env:N,8}")]),
        ("D=${D:-~/data}; a d=$D/x", [("a", "d=${oc.env:D,'~/data'}/x")]),
        (
            "A=${A:-$H/a}; B=${B:-${A}~}; C=${C:-$B}; a c=$C",
            [("a", "c=${oc.env:C,'${oc.env:B,'${oc.env:A,${oc.env:H}/a}~'}'}")],
        ),
        ("D=${D:-$(python3 -c 'import x' 2>/dev/null && echo npu || echo gpu)}; a d=$D", [("a", "d=${oc.env:D,gpu}")]),
    ],
)
def test_a_script_is_split_as_by_a_shell(script, expected):
    assert words(script) == expected


def test_a_value_that_depends_on_a_condition_is_noted():
    script = "N=1\nif [ $GAE ]; then\n  N=8\nfi\nM=x\nL=n$N\na n=$L m=$M"
    (*_, command) = shell.commands(script)
    assert command.words == ("a", "n=n8", "m=x")
    assert command.notes == ("L depends on a condition in the script; the last value is taken: n8",)


@pytest.mark.parametrize(
    ("condition", "taken"),
    [
        ('[ "$B" = vllm ]', True),
        ('[ "$B" != "vllm" ]', False),
        ("[[ $B == v* ]]", True),
        ('[ "${KNOWN}" -gt 2 ] && [ "${V:-1}" != 0 ]', True),
        ('[ "$KNOWN" -lt 3 ] || { [ "$B" = sglang ] || [ "$B" = vllm ]; }', True),
        ('[[ -z "$EMPTY" && -n "$B" ]]', True),
        ('[ -n "$EMPTY" -o "$B" = sglang ]', False),
        ('! [ "$B" = vllm ]', False),
        ("[ ! $B = vllm ]", False),
        ("true", True),
        ('[ "$UNKNOWN" = x ]', None),
        ('[ "$UNKNOWN" = x ] && [ "$B" = sglang ]', False),
        ('[ -f "$B" ]', None),
        ('[ "$1" = x ]', None),
        ('[ "$MODE" = x ]', None),
        ('[ "$#" -lt 2 ]', None),
        ("python -c 'import x'", None),
        ("[ $B -eq 1 ]", None),
        ("[ ", None),
    ],
)
def test_a_condition_is_decided_where_its_values_are_known(condition, taken):
    script = f"B=${{B:-vllm}}; EMPTY=; MODE=$1; N=0\nif {condition}; then\n  N=1\nelse\n  N=2\nfi\na n=$N"
    (*_, command) = shell.commands(script, {"KNOWN": "3"})
    assert command.words == ("a", "n=1" if taken else "n=2")
    assert bool(command.notes) == (taken is None)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("case $B in\n  sglang) N=1 ;;\n  trt|vllm) N=2\n  M=3 ;;\n  *) N=4\nesac\na n=$N m=$M", ("a", "n=2", "m=3")),
        ("case $B in (trt) N=1;; esac; case x in *) N=5;; esac\na n=$N", ("a", "n=5")),
        ("if [ $B = trt ]; then N=1; elif [ $B = vllm ]; then N=2; elif true; then N=3; fi\na n=$N", ("a", "n=2")),
        ("if [ $B = trt ]; then if true; then N=1; fi; else N=4; fi\na n=$N", ("a", "n=4")),
        ("A=(x=1)\nif [ $B = trt ]; then\n  A+=(y=2)\nfi\na ${A[@]}", ("a", "x=1")),
        ("[ $B = vllm ] && N=1 || N=2\na n=$N", ("a", "n=1")),
        ("[ $B = trt ] && N=1 || N=2\na n=$N", ("a", "n=2")),
        ("N=1; [ $B = trt ] && N=3; a n=$N", ("a", "n=1")),
        ("for x in 1 2; do if [ $B = trt ]; then N=1; else N=2; fi; done\na n=$N", ("a", "n=2")),
    ],
)  # fmt: skip
def test_branches_that_are_not_taken_are_passed_over(script, expected):
    (*_, command) = shell.commands(f"B=${{B:-vllm}}\n{script}")
    assert command == shell.Command(expected, ())
    (*_, command) = shell.commands(f"B=${{B:-vllm}}\n{script}".replace("{B:-vllm}", "{B:-trt}"), {"B": "vllm"})
    assert command.words == expected  # the environment precedes the script's own value


def test_substitutions_of_commands_are_not_run(tmp_path):
    file = tmp_path / "made"
    (command,) = shell.commands(f"a b=$(touch {file}) c=`touch {file}`")
    assert not file.exists()
    assert "not executed" in command.notes[0]


@pytest.mark.parametrize(
    "script",
    [
        "'",
        '"',
        "a 'b",
        'a "b',
        "a ${",
        "a $(",
        "((((",
        "))))",
        "\\",
        "a=(",
        "$",
        "`",
        "",
        "if",
        "case",
        "case x in",
        "case x in a)",
        "fi",
        "esac",
        ";;",
    ],
)
def test_broken_scripts_have_an_end(script):
    shell.commands(script)
