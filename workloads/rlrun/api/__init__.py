"""The `RLRun` resource (`rlrun.io/v1alpha1`) as pydantic models: the only source of the API; imports pydantic only.

`resource` holds the models, `crd` what is generated from them, `resolve` turns a resource into the roles' configuration.
"""

API_VERSION = "rlrun.io/v1alpha1"
