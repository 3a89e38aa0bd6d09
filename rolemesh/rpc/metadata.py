"""Keys of a call's metadata, for client and server."""

import hashlib

# Of a request: its job and step, the call's id, and the version of the weights that the call requires.
JOB_KEY = "rolemesh-job"
STEP_KEY = "rolemesh-step"
CALL_KEY = "rolemesh-call"
VERSION_KEY = "rolemesh-weights-version"
# Of a request to a trained role: the term of the controller that calls (term.py).
TERM_KEY = "rolemesh-term"
# Of a request: asks for the server's timeline, which comes back in trailing metadata under the same key.
TIMELINE_KEY = "rolemesh-timeline"
# Of an answer, also to a health check: a random id of the running server. A change reveals a restart, which
# loses an actor's training. Two addresses with the same id are one server.
LIFE_KEY = "rolemesh-life"
# Of the answer to a health check, in trailing metadata: why the role is not ready.
WHY_KEY = "rolemesh-why"
# Of GroupService.Follow: the follower's rank, and the group's secret.
RANK_KEY = "rolemesh-rank"
SECRET_KEY = "rolemesh-secret"
# Of the answer to a health check, in trailing metadata: the role's fingerprint (rolemesh/fingerprint.py). Of a
# request: the digest of the fingerprint that the caller has seen.
FINGERPRINT_KEY = "rolemesh-fingerprint"


def call_digest(fingerprint: str) -> str:
    """Return the digest of a fingerprint's metadata, by which a call names the fingerprint."""
    return hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
