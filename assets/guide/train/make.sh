#!/bin/sh
# Rebuilds guide.gguf, its scores, its loss curve and its card: sh make.sh FOLDER MINUTES
# FOLDER keeps the run; called again, it goes on from the last checkpoint. Needs Python 3.11 with requirements.txt.
# With `tune` behind MINUTES it tunes the shipped guide.gguf instead, after a change of facts: train/tune.json names those that
# are drawn more often. One thread at the lowest priority; the loss curve of the long run stays.
set -e
cd "$(dirname "$0")"
folder=$1
# One thread per operator: the trainer's two workers are the parallelism. Few arenas, or memory grows with every length of batch.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive MALLOC_ARENA_MAX=2
python chat.py
if [ "$3" = tune ]; then
    python hints.py
    python check.py
    mkdir -p "$folder"
    cp ../guide.gguf "$folder/before.gguf"
    nice -n 19 python train.py "$folder" "$2" --tune "$folder/before.gguf"
    python export.py "$folder/guide.pt" ../guide.gguf --blend "$folder/before.gguf"
else
    # A run that goes on keeps the hints that it has learnt to read.
    [ -e "$folder/guide.pt" ] || python hints.py
    python check.py
    python train.py "$folder" "$2"
    python plot.py "$folder/log.jsonl" ../loss.svg
    python export.py "$folder/guide.pt" ../guide.gguf
fi
OMP_NUM_THREADS=2 python evaluate.py ../guide.gguf "$folder/scores"
python card.py "$folder"
