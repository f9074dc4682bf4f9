{{- define "rlrun.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "rlrun.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "rlrun.name" .) -}}
{{- end -}}

{{/* Cluster-scoped objects of two releases must not meet. */}}
{{- define "rlrun.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "rlrun.name" .) -}}
{{- end -}}

{{- define "rlrun.selector" -}}
app.kubernetes.io/name: rlrun-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "rlrun.labels" -}}
{{ include "rlrun.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: rlrun
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* JSON list of the namespaces; empty: all. What the schema could only say as a pattern is said here in words. */}}
{{- define "rlrun.namespaces" -}}
{{- range .Values.watchNamespaces -}}
{{- if not (regexMatch "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$" .) -}}
{{- fail (printf "watchNamespaces: %q is not a namespace's name: up to 63 lower-case letters, digits and '-'" .) -}}
{{- end -}}
{{- end -}}
{{- if .Values.clusterWide -}}
{{- if .Values.watchNamespaces -}}
{{- fail (printf "watchNamespaces (%s) and clusterWide (true) contradict each other: remove one of them" (join ", " .Values.watchNamespaces)) -}}
{{- end -}}
[]
{{- else if not .Values.watchNamespaces -}}
{{- fail "watchNamespaces is empty: name the namespaces whose runs the operator serves, such as --set watchNamespaces={team-a}, or set clusterWide to true" -}}
{{- else if and (has .Release.Namespace .Values.watchNamespaces) (not .Values.serveOwnNamespace) -}}
{{- fail (printf "watchNamespaces: %s is the namespace of this release; install the operator into one of its own (--namespace rlrun-system --create-namespace), or set serveOwnNamespace to true" .Release.Namespace) -}}
{{- else -}}
{{- .Values.watchNamespaces | toJson -}}
{{- end -}}
{{- end -}}

{{/* Image: the given one (its value's name is last), or ours with the chart's version. */}}
{{- define "rlrun.image" -}}
{{- $given := index . 1 -}}
{{- if regexMatch "\\s" $given -}}
{{- fail (printf "%s: %q holds white space; an image looks like registry.example.com/rlrun-trainer:1.0" (index . 3) $given) -}}
{{- end -}}
{{- $given | default (printf "ghcr.io/rlrun/rlrun-%s:%s" (index . 2) (index . 0).Chart.AppVersion) -}}
{{- end -}}

{{/* Queue in which runs wait: none, own, kueue or volcano. */}}
{{- define "rlrun.queue" -}}
{{- $queue := .Values.queue | default dict -}}
{{- $queue.provider | default (ternary "own" "none" (eq true $queue.enabled)) -}}
{{- end -}}

{{/*
What the operator may do where it serves runs: the least that works. It creates Secrets and never reads one. The right to get and patch
Leases is also what it hands on to each run's orchestrator, for that run's Lease alone.
*/}}
{{- define "rlrun.rules" -}}
- apiGroups: [rlrun.io]
  resources: [rlruns]
  verbs: [get, list, watch]
- apiGroups: [rlrun.io]
  resources: [rlruns/status]
  verbs: [patch]
# Kubernetes asks for it of who makes children that block their run's deletion in the foreground.
- apiGroups: [rlrun.io]
  resources: [rlruns/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [statefulsets, deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps, serviceaccounts]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create, patch]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get, list, watch, create, patch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [list, create, patch]
{{- if eq (include "rlrun.queue" .) "own" }}
- apiGroups: [""]
  resources: [resourcequotas]
  verbs: [list]
{{- if .Values.clusterWide }}
- apiGroups: [scheduling.k8s.io]
  resources: [priorityclasses]
  verbs: [get]
{{- end }}
{{- end }}
{{- if eq (include "rlrun.queue" .) "kueue" }}
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, list, create, patch, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [update]
{{- if .Values.clusterWide }}
- apiGroups: [kueue.x-k8s.io]
  resources: [resourceflavors, workloadpriorityclasses]
  verbs: [get]
- apiGroups: [scheduling.k8s.io]
  resources: [priorityclasses]
  verbs: [get]
{{- end }}
{{- end }}
{{- if eq (include "rlrun.queue" .) "volcano" }}
- apiGroups: [scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [get, list, create, patch, delete]
{{- if .Values.clusterWide }}
- apiGroups: [scheduling.volcano.sh]
  resources: [queues]
  verbs: [get]
{{- end }}
{{- end }}
{{- end -}}

{{/* ConfigMap with the defaults for runs; empty: there are none. */}}
{{- define "rlrun.defaults" -}}
{{- $given := .Values.runDefaults | default dict -}}
{{- if $given.configMap -}}
{{- if or $given.all $given.namespaces -}}
{{- fail (printf "runDefaults.configMap (%s) contradicts runDefaults.all and runDefaults.namespaces: write them into that ConfigMap, or remove its name" $given.configMap) -}}
{{- end -}}
{{- $given.configMap -}}
{{- else if or $given.all $given.namespaces -}}
{{- include "rlrun.name" . }}-defaults
{{- end -}}
{{- end -}}

{{/* What of the network the operator is given; what is empty it finds itself. */}}
{{- define "rlrun.network" -}}
{{- $network := dict -}}
{{- $given := .Values.networkPolicy | default dict -}}
{{- with $given.dns }}{{- $_ := set $network "dns" . -}}{{- end -}}
{{- with $given.apiServer }}{{- $_ := set $network "apiServer" . -}}{{- end -}}
{{- with $given.runMetricsFrom }}{{- $_ := set $network "metricsFrom" . -}}{{- end -}}
{{- $network | toJson -}}
{{- end -}}

{{/* The web page. Its pods share no label with the operator's selector. */}}
{{- define "rlrun.ui.name" -}}
{{- printf "%s-ui" (include "rlrun.name" .) -}}
{{- end -}}

{{- define "rlrun.ui.selector" -}}
app.kubernetes.io/name: rlrun-ui
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "rlrun.ui.labels" -}}
{{ include "rlrun.ui.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: ui
app.kubernetes.io/part-of: rlrun
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Namespace of the page's pod. In one with runs, others than we may exec into it, so tokens that the API server takes are refused there. */}}
{{- define "rlrun.ui.namespace" -}}
{{- $ui := .Values.ui -}}
{{- $served := include "rlrun.namespaces" . | fromJsonArray -}}
{{- if and $ui.namespace $served (not (has $ui.namespace $served)) -}}
{{- fail (printf "ui.namespace: the operator does not serve %s; name one of watchNamespaces (%s), or leave it empty" $ui.namespace (join ", " $served)) -}}
{{- end -}}
{{- if and $ui.claims (not $ui.namespace) -}}
{{- fail (printf "ui.claims (%s) are mounted from the page's own namespace: set ui.namespace to the one that has them" (join ", " $ui.claims)) -}}
{{- end -}}
{{- if and $ui.namespace (not $ui.audiences) -}}
{{- fail (printf "ui.audiences is empty: whoever may exec into pods of %s could read the tokens of those who log in, so they must be of no use elsewhere; set it to [rlrun-ui], for tokens of kubectl create token NAME --audience rlrun-ui" $ui.namespace) -}}
{{- end -}}
{{- $ui.namespace | default .Release.Namespace -}}
{{- end -}}

{{/* JSON list of the namespaces whose runs the page shows; empty: all. */}}
{{- define "rlrun.ui.shows" -}}
{{- if .Values.ui.namespace -}}
{{- list .Values.ui.namespace | toJson -}}
{{- else -}}
{{- include "rlrun.namespaces" . -}}
{{- end -}}
{{- end -}}
