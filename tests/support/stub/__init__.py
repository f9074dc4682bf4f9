"""Stand-ins of trainer, engine and tiny-model maker without torch and vLLM: a small image runs a whole RLRun in seconds.

    python -m tests.support.stub.model        --config run.json     a model folder that `trainer` and `inference` below understand
    python -m tests.support.stub.trainer      --config run.json     one process per trainer pod
    python -m tests.support.stub.inference    --config run.json     one engine
    tests/support/stub/rlrun-pod ROLE                               `rlrun-pod` of the stub image, which starts these three

The orchestrator beside them is the real one; it needs neither torch nor an engine.

Files, manifests, attempts, channel, hand-over, guard, exit codes and signals are those of the real roles, in most places their own
code. What is made up: a policy is one number, the probability that it writes the right character of `reverse-text`; a step moves
it towards a final value, weights carry it to the engine, and the engine answers as well as the weights that it holds. So rewards
rise, and a run that continues from the wrong checkpoint, or an engine that holds the wrong version, shows in them. Other
environments get random letters.

Durations and faults come from a script, a JSON object in `STUB_SCRIPT` (the manifest's `env` of a role can set it) or else in
`<run folder>/stub.json`; every field has a default, and `script` says what each fault is:

    {"trainer": {"startSeconds": 1, "stepSeconds": 0.2, "faults": [{"attempt": 1, "step": 7, "action": "exit", "code": 1}]},
     "inference": {"startSeconds": 1, "tokenSeconds": 0.001, "faults": [{"version": 12, "action": "sigkill"}]},
     "policy": {"first": 0.35, "last": 0.95, "halfLifeSteps": 10}}

Which engine faults have happened is kept in `<run folder>/stub/`, so that an engine that comes back is not hit again.
"""
