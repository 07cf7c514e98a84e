#!/usr/bin/env bash
# Calibrate a device, record a mid-size model on it and hold the simulator against it. See README.md beside this file.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
out=${1:-${OUT:-}}
size=${SIZE:-full}
device=${DEVICE:-cuda}
python=${PYTHON:-python3}
if [[ -z $out ]]; then
    echo "run_gpu.sh: name an output folder, as argument or in OUT" >&2
    exit 2
fi
case $size in full | small) ;; *)
    echo "run_gpu.sh: SIZE is $size, allowed: full, small" >&2
    exit 2
    ;;
esac
mkdir -p "$out"
out=$(cd "$out" && pwd)
: >"$out/run.log"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

profiler() { "$python" -c 'import sys; from profiler.cli.main import run; sys.exit(run())' "$@"; }
simulator() { "$python" -c 'import sys; from moesim.cli.main import run; sys.exit(run())' "$@"; }
export -f profiler simulator
export python

failed=0
# step NAME SECONDS COMMAND...: a step that fails or takes too long does not take the others with it.
step() {
    local name=$1 seconds=$2 begin=$SECONDS code=0
    shift 2
    # Without the quotes of "$@" a word with spaces would fall apart in the inner shell.
    echo "== $name" >>"$out/run.log"
    timeout --kill-after=10 "$seconds" bash -c '"$@"' step "$@" >>"$out/run.log" 2>&1 || code=$?
    if ((code)); then
        failed=1
        echo "$name: failed with code $code after $((SECONDS - begin)) s, see run.log:"
        tail -n 3 "$out/run.log"
    else
        echo "$name: $((SECONDS - begin)) s"
    fi
}

calibrate=(--device "$device" --out "$out/device.toml" --json)
record=(--prompts "$here/prompts.jsonl" --out "$out/trace" --sample --seed 1 --ignore-eos --device "$device"
    --shard-requests 64 --licence Apache-2.0 --json)
validate=(--prompts "$here/prompts.jsonl" --out "$out/validation" --device "$device" --prompt-tokens 5 --quick)
[[ $device == cpu ]] && calibrate+=(--link-bandwidth "1 GB/s")
if [[ $size == full ]]; then
    calibrate+=(--model qwen3-30b-a3b)
    # With the peaks of a catalog device, rates become shares of them.
    [[ -n ${LIKE:-} ]] && calibrate+=(--like "$LIKE")
    config=$here/qwen3_moe_12_layers.json
    record+=(--new-tokens 64 --batch 4 --prompt-tokens 128)
    validate+=(--model "$here/qwen3_moe_4_layers.json" --new-tokens 17 --repeats 3 --limit 4)
else
    calibrate+=(--model tiny-moe --quick)
    config=$here/qwen3_moe_small.json
    record+=(--new-tokens 8 --batch 4 --prompt-tokens 16 --limit 8)
    validate+=(--model "$config" --set "model=$config" --set cache.slots=6 --new-tokens 5 --repeats 1 --limit 1)
fi

step calibrate 130 profiler calibrate "${calibrate[@]}"
step record 150 profiler record "$config" "${record[@]}"
step stats 40 simulator trace stats "$out/trace" --out "$out/stats"
step validate 180 profiler validate "$here/validation.toml" "${validate[@]}"
echo "all: $SECONDS s, in $out"
exit "$failed"
