{#- Ends by an exit code that the record of the run decides: launchers report 1 for every end. -#}
{%- set record = (output_dir ~ "/run.json") | quote -%}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300
began=$(mktemp); {{ command | join_words }} && exit {{ exit_done }}
[ {{ record }} -nt $began ] || exit {{ exit_bug }}
if grep -qE '{{ resumable }}' {{ record }}; then exit {{ exit_preempted }}; fi
if grep -qE '{{ final }}' {{ record }}; then exit {{ exit_user }}; fi
exit {{ exit_bug }}
