"""The keys of a call's metadata, at either end."""

# The metadata of a call: for which job and step it is made, its id, and the weights that it counts on.
JOB_KEY, STEP_KEY, CALL_KEY = "rolemesh-job", "rolemesh-step", "rolemesh-call"
VERSION_KEY = "rolemesh-weights-version"
# Asks for what the server did when, which comes with the answer's trailing metadata under the same name.
TIMELINE_KEY = "rolemesh-timeline"
# Of the answer: which life of the server made it. A role that is trained begins anew when it is restarted.
LIFE_KEY = "rolemesh-life"
