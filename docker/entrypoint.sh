#!/bin/sh
# `RECIPE --config F ...` trains; anything else is a command of `recipes`. LAUNCH names a file of
# accelerate_configs/, and NUM_PROCESSES replaces its number of processes.
set -eu
recipe=${1-}
case "$recipe" in
    */* | -* | "") ;;
    *)
        recipe="/app/recipes/$recipe.py"
        if [ -f "$recipe" ]; then
            shift
            # One process is started without a launcher, so that it receives the signal of `docker stop` and saves.
            if [ -z "${LAUNCH-}" ]; then
                exec python "$recipe" "$@"
            fi
            exec accelerate launch --config_file "/app/accelerate_configs/$LAUNCH.yaml" \
                ${NUM_PROCESSES:+--num_processes "$NUM_PROCESSES"} "$recipe" "$@"
        fi
        ;;
esac
exec recipes "$@"
