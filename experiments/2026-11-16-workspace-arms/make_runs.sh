#!/bin/sh
# The logged sessions whose pairs channel 3 learns from: 100 sessions of a scripted agent that errs, on tasks that are
# neither rolled out in training (10,000 to 10,999) nor held out (850 to 949). Makes runs/corrections, runs/advisers and
# runs/both in the folder it is called in. Needs the extra `replay`. CRF_SANDBOX=rlimits where no wall can be had.
set -eu
number=100 first=20000
mkdir -p runs
[ -d runs/logs ] || crf world logs -n $number --seed $first -o runs/logs > runs/logs.txt

run() { # name, then options of `crf pairs`
    name=$1; shift
    crf ingest runs/logs -o "runs/$name" > /dev/null
    crf sites "runs/$name" > /dev/null
    if [ "$name" != corrections ]; then
        crf replay "runs/$name" --teachers runs/teachers.json --max-usd 1 --failed > /dev/null
    fi
    crf pairs "runs/$name" "$@" | sed -n '/^Pairs/,$p'
}

run corrections
crf world advisers -n $number --seed $first > runs/advisers.txt &
server=$!
trap 'kill $server' EXIT
until grep -q http runs/advisers.txt; do sleep 1; done
address=$(grep -o 'http://[^ ]*' runs/advisers.txt | head -1)
crf teachers --slug world-expert --slug world-flawed-0.1 --slug world-flawed-0.3 --base-url "$address" -o runs/teachers.json > /dev/null
run advisers --set pairs.corrections=false
run both
