#!/bin/bash
{% set words = ["hf", "jobs", "run", "--flavor", gpu, "--timeout", hours ~ "h", "--name", name, "--attempts", (retries + 1) | string] %}
{% set secret_words = [] %}{% for secret in secrets %}{% set _ = secret_words.extend(["--secrets", secret]) %}{% endfor %}
{{ (words + ["--volume", volume ~ ":" ~ data, "--detach"] + secret_words + [image, "bash", "-c", "cd /app\n" ~ run]) | join_words }}
