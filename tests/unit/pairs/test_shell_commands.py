"""Shell commands that do the same have one key, and near misses do not."""

from __future__ import annotations

import shutil
import subprocess
from random import Random

import pytest
from action_forms import CWD, bash, call, key
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.sites.actions.equality import ActionContext
from composer_replication.sites.actions.shell_equality import command_key
from composer_replication.sites.actions.shell_parser import parse_script

SAME = [
    ("ls -la", "ls -al"),
    ("ls -la", "ls  -l   -a "),
    ("ls --all -l", "ls -la"),
    ("ls -l -a .", "ls -a -l /repo/"),
    ("ls src tests", "ls tests/ ./src"),
    ("ls -la *.py", "ls -al ./*.py"),
    ("ls -la $DIR", "ls -al ${DIR}"),
    ("ls # what is here", "ls"),
    ("ls;", "ls\n"),
    ('cat "a.py"', "cat ./a.py"),
    ("cat my\\ notes.txt", "cat 'my notes.txt'"),
    ("cat /repo/src/../a.py", "cat a.py"),
    ('git commit -m "fix it"', "git commit -m 'fix it'"),
    ("git commit -am fix", "git commit --all --message=fix"),
    ("git commit -m \"$(cat <<'EOF'\nfix it's\n\nbody\nEOF\n)\"", 'git commit -m "fix it\'s\n\nbody"'),
    ("git add a b", "git add ./b a"),
    ("git -C /repo status", "git status"),
    ("git log --oneline -5", "git log -n 5 --oneline"),
    ("git diff --staged", "git diff --cached"),
    ("git diff HEAD -- ./a.py", "git diff HEAD -- /repo/a.py"),
    ("git push origin main -u", "git push --set-upstream origin main"),
    ("cd /repo && pytest -q tests/", "pytest tests -q"),
    ("cd /repo; ls", "ls"),
    ("cd src && ls", "cd /repo/src && ls"),
    ("cd /repo && cd src && cat a", "cd src && cat ../src/a"),
    ("pytest -xvs tests/t.py::test_a", "pytest -s -v -x /repo/tests/t.py::test_a"),
    ("python -m pytest -q t.py", "python -m pytest t.py -q"),
    ("python3 -c 'print(1)'", 'python3 -c "print(1)"'),
    ("python ./run.py --a 1", "python /repo/run.py --a 1"),
    ("grep -rn 'foo' src/", "grep -n -r foo ./src"),
    ("grep -A3 foo f", "grep -A 3 -e foo f"),
    ("grep --recursive --include='*.py' x .", 'grep -r --include="*.py" x /repo'),
    ("rg -n -i todo src", "rg todo src -in"),
    ("rm -rf a b", "rm -fr b a/"),
    ("rm -r -f -- a", "rm -rf a"),
    ("mkdir -p a/b", "mkdir --parents ./a/b"),
    ("cp -R a b", "cp -r a b"),
    ("head -20 f", "head -n 20 f"),
    ("head f", "head -n10 f"),
    ("tail -n5 f", "tail --lines=5 f"),
    ("sed -n '1,5p' f", "sed -n 1,5p ./f"),
    ("sed 's/a/b/' -i f", "sed -i 's/a/b/' f"),
    ("find . -name '*.py' -type f", 'find /repo -type f -name "*.py" -print'),
    ("find . -not -path '*/x/*' -name y", "find . -name y ! -path '*/x/*'"),
    ("tar xzf a.tgz", "tar -zxf a.tgz"),
    ("make -j 4 all", "make all -j4"),
    ("npm test", "npm run test"),
    ("npm i -D x", "npm install x --save-dev"),
    ("go test -v -run X ./...", "go test ./... -run=X -v"),
    ("curl -sSL https://x.io", "curl -L -s -S https://x.io"),
    ("docker build -t x .", "docker build . --tag x"),
    ("gh pr create --title a --body b", "gh pr create -b b -t a"),
    ("apt-get install -y jq", "apt-get -y install jq"),
    ("rsync -avz a/ b/", "rsync -vza a/ b/"),
    ("git clean -fd", "git clean -d --force"),
    ("sudo rm -rf x", "sudo rm -fr x"),
    ("timeout 60 pytest -q -x", "timeout 60 pytest -x -q"),
    ("uv run pytest -q t", "uv run pytest t -q"),
    ("A=1 B=2 make", "B=2 A=1 make"),
    ("env A=1 make", "A=1 make"),
    ("echo hello world", 'echo "hello world"'),
    ("echo $'a\\tb'", "echo 'a\tb'"),
    ("make > out.txt 2>&1", "make &> ./out.txt"),
    (">out.txt make", "make 1> /repo/out.txt"),
    ("make 2>&1 | tail -3", "make |& tail -n 3"),
    ("make 2>/dev/null >o", "make >o 2>/dev/null"),
    ("cat <<'EOF' > f\nhi\nEOF", "cat > f <<END\nhi\nEND\n"),
    ("cat <<-EOF\n\thi\n\tEOF", "cat <<< hi"),
    ("a && b", "a &&\n  b"),
    ("a; b", "a\n\nb"),
    ("(cd a && ls -la)", "( cd ./a && ls -al )"),
    ("bash -c 'ls -la'", 'bash -c "ls -al"'),
    ("for f in a b; do ls -la $f; done", "for f in a b\ndo\n  ls -al $f\ndone"),
    ("if [ -f a ]; then cat a; else ls; fi", "if [ -f a ]\nthen cat ./a\nelse\n ls\nfi"),
    ("ls \\\n  -la", "ls -la"),
]
DIFFERENT = [
    ("ls -la", "ls -lA"),
    ("ls -t -S", "ls -S -t"),
    ("ls src", "ls Src"),
    ("ls ~", "ls '~'"),
    ("ls $D -la", "ls -la $D"),
    ("cd src && ls", "ls src"),
    ("cd src && ls", "ls"),
    ("cd src; ls a", "cd src || ls a"),
    ("make && cd x; cat a", "make && cd x; cat /repo/x/a"),
    ('cd "$D" && cat a', "cat a"),
    ("a && b", "a; b"),
    ("a && b", "b && a"),
    ("a | b", "a || b"),
    ("a &", "a"),
    ("! a", "a"),
    ("cat a b", "cat b a"),
    ("cat a", "cat a a"),
    ("cp a b", "cp b a"),
    ("mv a b/", "mv a b"),
    ("mkdir a a/b", "mkdir a/b a"),
    ("rm -i -f x", "rm -f -i x"),
    ("rm -r x", "rm -rf x"),
    ("rm *", "rm '*'"),
    ("find . -name *.py", "find . -name '*.py'"),
    ("find . -delete -name x", "find . -name x -delete"),
    ("find . -name a -o -name b", "find . -name b -name a"),
    ("echo $X", "echo '$X'"),
    ('echo "$X"', "echo $X"),
    ("echo a  b", 'echo "a  b"'),
    ("echo -n a", "echo a -n"),
    ("grep -r foo src", "grep -R foo src"),
    ("grep foo bar", "grep bar foo"),
    ("grep -i foo f", "grep foo f"),
    ("grep --include=a --exclude=b x .", "grep --exclude=b --include=a x ."),
    ("x > f", "x >> f"),
    ("x 2>&1 >f", "x >f 2>&1"),
    ("cat < f", "cat f"),
    ("cat <<EOF\n$X\nEOF", "cat <<'EOF'\n$X\nEOF"),
    ("cat <<EOF\na\nEOF", "cat <<EOF\na\n\nEOF"),
    ("sed -i x f", "sed x f"),
    ("sed -ie x f", "sed -i -e x f"),
    ("head -n 5 f", "head -c 5 f"),
    ("tail -n +5 f", "tail -n 5 f"),
    ("git add .", "git add -A"),
    ("git checkout f", "git checkout -- f"),
    ("git commit -m a -m b", "git commit -m b -m a"),
    ("git push", "git push -f"),
    ("git diff a b", "git diff b a"),
    ("git log -5", "git log -6"),
    ("pytest -k 'a and b'", "pytest -k 'a or b'"),
    ("pytest a.py b.py", "pytest b.py a.py"),
    ("pytest -x", "pytest -v"),
    ("python run.py -a -b", "python run.py -b -a"),
    ("python -m pytest", "pytest"),
    ("npm install", "npm ci"),
    ("npm run build", "npm run test"),
    ("tar czf x.tgz src", "tar czf x.tgz /repo/src"),
    ("tar -xfz a", "tar -xzf a"),
    ("A=1 make", "make A=1"),
    ("A=1 B=$A make", "B=$A A=1 make"),
    ("export A=1", "A=1"),
    ("(cd a)", "cd a"),
    ("./run.sh", "run.sh"),
    ("rsync -a a/ b", "rsync -a a b"),
    ("gh pr create -t a", "gh issue create -t a"),
    ("xargs ls", "xargs ls ."),
    ("ln -s a b", "ln -s /repo/a b"),
    ("sleep 1; ls", "sleep 1; ls -a"),
    ("eval ls", "ls"),
    ("echo `date`", "echo date"),
    ("case a in a) ls;; esac", "case a in a) ls ;; b) ;; esac"),
    ("f() { ls; }", "f() { pwd; }"),
]


@pytest.mark.parametrize(("first", "second"), SAME)
def test_commands_that_do_the_same_have_one_key(first, second):
    assert key(bash(first)) == key(bash(second))


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_near_misses_have_keys_of_their_own(first, second):
    assert key(bash(first)) != key(bash(second))


def test_what_is_not_understood_is_compared_by_its_letters_but_for_blanks_at_the_ends():
    odd = "case $x in a) ls -la;; esac"
    assert key(bash(odd)) == key(bash(f"  {odd}\n"))
    assert key(bash(odd)) != key(bash(odd.replace("-la", "-al")))


def test_without_a_folder_relative_and_absolute_paths_are_apart_and_relative_ones_still_meet():
    nowhere = ActionContext()
    assert key(bash("cat a.py"), nowhere) == key(bash("cat ./b/../a.py"), nowhere)
    assert key(bash("cat a.py"), nowhere) != key(bash("cat /repo/a.py"), nowhere)


def test_a_shell_that_may_stand_elsewhere_does_not_know_the_folder():
    moved = ActionContext(cwd=CWD, may_have_left_cwd=True)
    assert key(bash("cat a.py"), moved) != key(bash("cat /repo/a.py"), moved)
    assert key(bash("cd /repo && ls"), moved) != key(bash("ls"), moved)


def test_a_list_of_words_is_run_without_a_shell_and_a_shell_in_it_is_looked_into():
    def shell(command):
        return key(call("shell", command=command))

    assert shell(["ls", "-la"]) == shell(["ls", "-al"])
    assert shell(["bash", "-lc", "ls -la"]) == shell(["ls", "-l", "-a"])
    assert shell(["ls", "*.py"]) != shell(["bash", "-lc", "ls *.py"])
    assert shell(["echo", "$X"]) != shell(["bash", "-lc", "echo $X"])


# No operators, no substitutions: nothing but words, of which bash prints what it makes of them.
PARTS = [*"ab '\"\\#{}~!=-/\n\t$*,", "$'", "\\n", "''", '""']


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_words_are_those_that_bash_makes_of_the_text(tmp_path):
    random, compared = Random(0), 0
    while compared < 60:
        command = "printf '%s\\0' x" + "".join(random.choice(PARTS) for _ in range(random.randint(1, 14)))
        try:
            (chain,) = parse_script(command)
        except ValueError:  # not understood, or several commands
            continue
        found = [word.literal for word in chain.pipelines[0].commands[0].words]
        if None in found:
            continue
        printed = subprocess.run(["bash", "-c", command], capture_output=True, check=True, cwd=tmp_path).stdout
        assert printed.decode().split("\0")[:-1] == found[2:], command
        compared += 1


names = st.from_regex(r"[a-z][a-z0-9_.]{0,8}", fullmatch=True)
letters = st.lists(st.sampled_from("lahrtsi"), min_size=1, max_size=5, unique=True)


@given(letters, st.randoms(use_true_random=False), names)
def test_the_order_and_grouping_of_single_letters_does_not_matter(flags, random, name):
    shuffled = random.sample(flags, len(flags))
    cut = random.randint(0, len(shuffled))
    groups = [f"-{''.join(part)}" for part in (shuffled[:cut], shuffled[cut:]) if part]
    words = [*groups, name]
    random.shuffle(words)
    assert key(bash(f"ls -{''.join(flags)} {name}")) == key(bash(f"ls {' '.join(words)}"))


def quoted_forms(word: str) -> list[str]:
    escaped = "".join(f"\\{char}" if not char.isalnum() else char for char in word)
    double = "".join(f"\\{char}" if char in '"\\$`' else char for char in word)
    return [f"'{word}'", f'"{double}"', escaped, f"{escaped[:0]}''{escaped}"]


words = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S", "Zs"], exclude_characters="'"), min_size=1)


@given(st.lists(words, min_size=1, max_size=4), st.data())
def test_quoting_leaves_no_trace(texts, data):
    spelled = [
        " ".join(["prog", *(data.draw(st.sampled_from(quoted_forms(text))) for text in texts)]) for _ in range(2)
    ]
    assert key(bash(spelled[0])) == key(bash(spelled[1]))
    (chain,) = parse_script(spelled[0])
    assert [word.literal for word in chain.pipelines[0].commands[0].words] == ["prog", *texts]


@given(st.lists(words, min_size=1, max_size=4), st.data())
def test_a_changed_letter_changes_the_key(texts, data):
    place = data.draw(st.integers(0, len(texts) - 1))
    letter = data.draw(st.integers(0, len(texts[place]) - 1))
    other = texts[place][:letter] + ("y" if texts[place][letter] == "x" else "x") + texts[place][letter + 1 :]
    changed = [*texts[:place], other, *texts[place + 1 :]]
    before, after = (" ".join(["prog", *(f"'{each}'" for each in each_text)]) for each_text in (texts, changed))
    assert command_key(before, CWD) != command_key(after, CWD)
