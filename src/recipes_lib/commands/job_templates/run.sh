{#- Ends by an exit code that the record of the run decides, if this job has written one: that of a killed launcher says
less. A pipeline reports its stages itself. -#}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300
{% if output_dir %}
{% set record = (output_dir ~ "/run.json") | quote %}
before=$(stat -c %y {{ record }} 2>/dev/null)
{% endif %}
{{ command | join_words }} &
job=$!
# A container's SIGTERM reaches only its first process, this shell. A signal interrupts `wait`, not the job.
trap 'kill -TERM "$job"' TERM
wait "$job"
while kill -0 "$job" 2>/dev/null; do wait "$job"; done
wait "$job"
code=$?
{% if output_dir %}
[ "$code" != {{ exit_done }} ] || exit {{ exit_done }}
[ "$(stat -c %y {{ record }} 2>/dev/null)" != "$before" ] || exit "$code"
if grep -qE '{{ resumable }}' {{ record }}; then exit {{ exit_preempted }}; fi
if grep -qE '{{ final }}' {{ record }}; then exit {{ exit_user }}; fi
exit {{ exit_bug }}
{%- else %}
case $code in {{ exit_stalled }}) exit {{ exit_preempted }};; {{ exit_diverged }}) exit {{ exit_user }};; esac
exit $code
{%- endif %}
