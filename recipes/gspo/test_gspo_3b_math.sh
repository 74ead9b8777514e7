#!/usr/bin/env bash
# The same recipe without dynamic sampling: every group is trained on, those of equal rewards without a gradient.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
exec "${PYTHON:-python3}" "$here/main_gspo_dynamic.py" \
    algorithm.filter_groups.enable=false \
    algorithm.filter_groups.max_num_gen_batches=0 \
    data.gen_batch_size=null \
    trainer.experiment_name=gspo_3b_math \
    "$@"
