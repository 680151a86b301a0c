{{- /* What the operator does in the namespaces that it watches: rules of a ClusterRole, or of a Role in each of them.
       Applying (server-side) needs patch, and create for what is not there yet. */ -}}
{{- define "operator.rules" -}}
- apiGroups: [dsv4.dev]
  resources: [dsv4deployments]
  verbs: [get, list, watch]
- apiGroups: [dsv4.dev]
  resources: [dsv4deployments/status]
  verbs: [update]
- apiGroups: [dsv4.dev]
  resources: [dsv4deployments/finalizers] # for owner references that hold the owner's deletion up
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, create, delete]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [secrets] # by name; never listed
  verbs: [get, create]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [list, watch, create, patch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [get, create, patch]
{{- end -}}
