"""The `RLRun` resource (`rlrun.io/v1alpha1`) as pydantic models, which are the only source of the API. Imports only pydantic.

`resource` defines the models, `crd` generates the CRD from them, and `resolve` converts a resource into the roles' configuration.
"""

API_VERSION = "rlrun.io/v1alpha1"
