"""No secret in a configuration: token-like keys and token-shaped values are refused, and never repeated."""

from __future__ import annotations

import re

import yaml

from recipes_lib.errors import Problem

_KEY = re.compile(r"(^|_)(token|api_?key|apikey|password|passwd|secret|credentials?|access_key)$", re.IGNORECASE)
_TOKEN_OF_TEXT = re.compile(
    r"(^|_)(bos|eos|pad|unk|sep|cls|mask|stop|start|end|begin|image|audio|video|think|special|separator|role)_token$",
    re.IGNORECASE,
)
SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bapi_org_[A-Za-z0-9]{20,}|\bhf_oauth_[\w.-]{20,}"  # Hugging Face
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{20,}"  # GitHub, GitLab
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[\w-]{30,}|\bya29\.[\w-]{20,}"  # AWS, Google
    r"|\bsk-[A-Za-z0-9_-]{20,}|\b[sr]k_(?:live|test)_[A-Za-z0-9]{16,}"  # OpenAI, Anthropic; Stripe
    r"|\bwandb_v1_\w{20,}|\bnvapi-[\w-]{20,}|\bgsk_[A-Za-z0-9]{20,}|\br8_[A-Za-z0-9]{30,}|\bpypi-[\w-]{30,}"
    r"|\bxox[abeoprs]-[\w-]{10,}|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{5,}"  # Slack; a signed JSON web token
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|://[^/\s:@]+:[^/\s:@]+@"  # user:password@host
    r"|[?&](?i:[\w-]*(?:token|key|secret|password|signature)|sig)=[^&\s]{4,}"  # signed URLs
)
"""Access tokens and private keys, by their shape."""
SECRET_HINTS = (
    *("hf_", "api_org_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "AKIA", "ASIA", "AIza"),
    *("ya29.", "sk-", "sk_live", "sk_test", "rk_live", "rk_test", "wandb_v1_", "nvapi-", "gsk_", "r8_", "pypi-", "xox"),
    *("eyJ", "PRIVATE KEY", "://", "token=", "key=", "secret=", "password=", "signature=", "sig="),
)
"""A text without one of these has no ``SECRET``, but for parameters of an address in capitals; quicker to see."""
# W&B's older keys have the shape of a commit, and AWS's secret ones that of a digest: only their names tell.
_NAMED = re.compile(
    r"(?:wandb|w&b|api|aws|access|secret)\w*(?:key|token)\w*['\"]?\s*[:=]\s*['\"]?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])",
    re.IGNORECASE,
)
_HEX_KEY = re.compile(r"[0-9a-f]{40}")
_HOLDS_REVISIONS = frozenset({"dataset_mixture", "sources", "benchmarks"})
_REMEDY = "delete it and revoke it if it was shared; secrets come from the environment (HF_TOKEN, WANDB_API_KEY)"


def is_secret_key(key: str) -> bool:
    """Return whether a key asks for a secret; tokens of a vocabulary, such as ``stop_token``, are none."""
    return _KEY.search(key) is not None and _TOKEN_OF_TEXT.search(key) is None


def has_secret_shape(text: str) -> bool:
    """Return whether a text contains something of the shape of an access token."""
    return SECRET.search(text) is not None or _NAMED.search(text) is not None


def refuse_secret_key(where: str, key: str) -> Problem:
    """Say that ``key`` is not read, without its value."""
    return Problem(where, f"`{key}` would put a secret into a file", _REMEDY)


def refuse_secret_value(where: str, key: str, node: yaml.Node) -> Problem | None:
    """Return a problem when a text in ``node`` has the shape of an access token; the text is not repeated."""
    # 40 hex digits are a commit where a revision belongs, and W&B's older keys anywhere else.
    is_revision = key.endswith("revision") or key in _HOLDS_REVISIONS
    if any(has_secret_shape(text) or (_HEX_KEY.fullmatch(text) and not is_revision) for text in _texts(node)):
        return Problem(where, f"the value of `{key}` looks like an access token", _REMEDY)
    return None


def _texts(node: yaml.Node) -> list[str]:
    if isinstance(node, yaml.ScalarNode):
        return [node.value]
    children = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
    return [text for child in children for text in _texts(child)]
