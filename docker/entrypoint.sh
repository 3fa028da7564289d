#!/bin/sh
# `STAGE --config F ...` trains; anything else is a command of `recipes`. LAUNCH names a file of accelerate_configs/.
set -eu
stage=${1-}
case "$stage" in
    */* | -* | "") ;;
    *)
        recipe="/app/recipes/$stage.py"
        if [ -f "$recipe" ]; then
            shift
            # One process is started without a launcher, so that it hears `docker stop` itself and saves.
            if [ -z "${LAUNCH-}" ]; then
                exec python "$recipe" "$@"
            fi
            exec accelerate launch --config_file "/app/accelerate_configs/$LAUNCH.yaml" "$recipe" "$@"
        fi
        ;;
esac
exec recipes "$@"
