#!/bin/sh
# `RECIPE --config F ...` trains; anything else is a command of `recipes`. LAUNCH names a file of
# accelerate_configs/, with one process for each GPU, or NUM_PROCESSES.
set -eu
recipe=${1-}
script="/app/recipes/$recipe.py"
case "$recipe" in
    */* | -* | "") ;;
    *)
        if [ -f "$script" ]; then
            shift
            case "${LAUNCH:+$recipe}" in
                # One process is started without a launcher, so that it receives the signal of `docker stop` and saves.
                "") exec python "$script" "$@" ;;
                eval)
                    exec accelerate launch --config_file "/app/accelerate_configs/$LAUNCH.yaml" \
                        ${NUM_PROCESSES:+--num_processes "$NUM_PROCESSES"} "$script" "$@"
                    ;;
                # Trains only, and returns the exit code of the recipe, of which accelerate makes 1.
                *)
                    exec recipes launch --recipe "$recipe" --hardware "$LAUNCH" \
                        ${NUM_PROCESSES:+--num_processes "$NUM_PROCESSES"} "$@"
                    ;;
            esac
        fi
        ;;
esac
exec recipes "$@"
