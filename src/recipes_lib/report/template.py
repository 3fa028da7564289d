"""HTML and CSS of the report page, without scripts or external addresses."""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ run.name }} · training report</title>
<style>{{ style | safe }}</style>
</head>
<body>
<main>
<header>
<p class="eyebrow">{{ kicker }}</p>
<h1>{{ run.name }}</h1>
<p class="lead">{{ lead }}</p>
</header>
{% if problems %}
<section class="problems" aria-label="Problems">
<h2>Worth a look</h2>
<ul>{% for problem in problems %}<li>{{ problem }}</li>{% endfor %}</ul>
</section>
{% endif %}
{% if figures %}
<dl class="figures">
{% for figure in figures %}
<div><dt>{{ figure.label }}</dt><dd>{{ figure.value }}</dd>{% if figure.note %}<dd class="note">{{ figure.note }}</dd>
{% endif %}</div>
{% endfor %}
</dl>
{% endif %}
<section aria-label="Curves" class="charts">
{% for chart in charts %}
<figure role="img" aria-label="{{ chart.alt }}"{% if chart.is_wide %} class="wide"{% endif %}>
<figcaption>{{ chart.title }}</figcaption>
{{ chart.svg | safe }}
</figure>
{% else %}
<p class="empty">Nothing was logged that could be drawn.</p>
{% endfor %}
</section>
{% if samples %}
<section>
<h2>Samples</h2>
<p class="lead">The same prompts, answered greedily {{ samples_when }}.</p>
{% for sample in samples %}
<article>
<h3>Prompt</h3>
<pre class="prompt">{{ sample.prompt }}</pre>
<div class="answers">
{% for answer in sample.answers %}
<div>
<h3>{{ answer.when }} <span class="{{ 'stopped' if answer.stopped else 'cut' }}">{{ answer.verdict }}</span></h3>
<pre>{{ answer.text }}</pre>
</div>
{% endfor %}
</div>
{% if sample.reference is not none %}
<h3>Reference</h3>
<pre class="reference">{{ sample.reference }}</pre>
{% endif %}
</article>
{% endfor %}
</section>
{% endif %}
{% if facts %}
<section>
<h2>The run</h2>
<table class="facts">
{% for name, value in facts %}<tr><th scope="row">{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</table>
{% if config %}
<details>
<summary>Configuration: {{ config | length }} keys</summary>
<div class="scroll">
<table>
<thead><tr><th scope="col">Key</th><th scope="col">Value</th><th scope="col">Set by</th></tr></thead>
<tbody>
{% for name, value, origin in config %}
<tr{% if origin and origin != 'default' %} class="set"{% endif %}>\
<th scope="row">{{ name }}</th><td>{{ value }}</td><td>{{ origin }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
</details>
{% endif %}
</section>
{% endif %}
</main>
</body>
</html>
"""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f8; --card: #ffffff; --ink: #1c2024; --muted: #60666d; --rule: #d9dce0;
  --first: #2563c9; --second: #b04c08; --alarm: #c42b3c; --good: #1f7a4d; --warm: #fff6e8; --warm-rule: #e9b872;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #131519; --card: #1b1e23; --ink: #e8eaed; --muted: #9aa1a9; --rule: #343940;
    --first: #7fb0ff; --second: #f2a65a; --alarm: #ff7b86; --good: #6fd3a0; --warm: #2b2418; --warm-rule: #7a5c2c;
  }
}
@media print {
  :root {
    --page: #ffffff; --card: #ffffff; --ink: #1c2024; --muted: #60666d; --rule: #d9dce0;
    --first: #2563c9; --second: #b04c08; --alarm: #c42b3c; --good: #1f7a4d; --warm: #ffffff; --warm-rule: #e9b872;
  }
  main { max-width: none; padding: 0; }
  figure, article, .figures > div, .problems { break-inside: avoid; }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1040px; margin: 0 auto; padding: 48px 24px 72px; }
h1 { margin: 0; font-size: 30px; line-height: 1.2; letter-spacing: -.015em; overflow-wrap: anywhere; }
h2 { margin: 48px 0 4px; font-size: 20px; letter-spacing: -.01em; }
h3 { margin: 14px 0 4px; font-size: 12.5px; font-weight: 600; color: var(--muted); }
.eyebrow { margin: 0 0 6px; color: var(--muted); font-size: 13px; }
.lead { margin: 6px 0 0; color: var(--muted); }
.problems {
  margin-top: 24px; padding: 14px 20px; border-radius: 10px;
  background: var(--warm); border: 1px solid var(--warm-rule);
}
.problems h2 { margin: 0; font-size: 15px; }
.problems ul { margin: 6px 0 0; padding-left: 18px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin: 28px 0 0; }
.figures > div, figure, article, details, .facts {
  background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
}
.figures > div { padding: 14px 16px; }
dt { color: var(--muted); font-size: 12.5px; }
dd { margin: 2px 0 0; font-size: 23px; font-weight: 600; letter-spacing: -.015em; font-variant-numeric: tabular-nums; }
dd.note { font-size: 12.5px; font-weight: 400; letter-spacing: 0; color: var(--muted); }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 12px; margin-top: 12px; }
figure { margin: 0; padding: 14px 16px 8px; overflow-x: auto; }
figure.wide { grid-column: 1 / -1; }
figcaption { font-weight: 600; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: inherit !important; }
.empty { grid-column: 1 / -1; color: var(--muted); }
article { margin-top: 12px; padding: 6px 18px 18px; }
pre {
  margin: 0; padding: 10px 12px; background: var(--page); border-radius: 7px; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
.answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 0 16px; }
.answers > div { display: flex; flex-direction: column; }
.answers pre { flex: 1; min-height: 42px; }
.stopped, .cut { margin-left: 6px; font-weight: 400; }
.stopped { color: var(--good); }
.cut { color: var(--second); }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
.facts { display: block; padding: 8px 18px; margin-top: 12px; }
.facts tbody { display: block; }
.facts tr { display: grid; grid-template-columns: 200px 1fr; }
th, td { padding: 6px 12px 6px 0; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
tr + tr > * { border-top: 1px solid var(--rule); }
tbody th { font-weight: 400; color: var(--muted); }
tr.set th { color: var(--ink); font-weight: 600; }
thead th { color: var(--muted); font-weight: 600; border-bottom: 1px solid var(--rule); }
details { margin-top: 12px; padding: 12px 18px; }
summary { cursor: pointer; font-weight: 600; }
.scroll { overflow-x: auto; margin-top: 8px; }
@media (max-width: 720px) {
  main { padding: 28px 14px 48px; }
  .charts { grid-template-columns: 1fr; }
  figure.wide svg { min-width: 620px; }
  .facts tr { grid-template-columns: 130px 1fr; }
}
"""
