"""Stand-ins of trainer, engine and tiny-model maker without torch and vLLM: a small image runs a whole RLRun in
seconds.

    python -m tests.support.stub.model        --config run.json     a model folder for `trainer` and `inference` below
    python -m tests.support.stub.trainer      --config run.json     one process per trainer pod
    python -m tests.support.stub.inference    --config run.json     one engine
    tests/support/stub/rlrun-pod ROLE                               `rlrun-pod` of the stub image, which starts these
    three

They run with the real orchestrator, which needs neither torch nor an engine.

Files, manifests, attempts, channel, hand-over, guard, exit codes and signals are those of the real roles, mostly with
the same code. The policy is simulated: one number, the probability that it writes the right character of
`reverse-text`. A step moves it towards a final value, weights carry it to the engine, and the accuracy of the engine's
answers is that of its weights. So rewards rise, and they show a run that continues from the wrong checkpoint, or an
engine with the wrong version. Other environments get random letters.

Durations and faults come from a script, a JSON object in `STUB_SCRIPT` (the manifest's `env` of a role can set it) or
else in `<run folder>/stub.json`. Every field has a default, and `script` describes each fault:

    {"trainer": {"startSeconds": 1, "stepSeconds": 0.2, "faults": [{"attempt": 1, "step": 7, "action": "exit", "code":
    1}]},
     "inference": {"startSeconds": 1, "tokenSeconds": 0.001, "faults": [{"version": 12, "action": "sigkill"}]},
     "policy": {"first": 0.35, "last": 0.95, "halfLifeSteps": 10}}

Past engine faults are recorded in `<run folder>/stub/`, so that a restarted engine does not have the same fault twice.
"""
