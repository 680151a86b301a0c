{{- /* The name of the operator's objects: `helm install dsv4 …` gives dsv4-operator, and `helm install blue …` blue-dsv4-operator. */ -}}
{{- define "operator.name" -}}
{{- $name := include "operator.anyName" . -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $name) -}}
{{- fail (printf "fullnameOverride: the name %q, made of the release's, is none for a Service; set one that begins with a letter and has letters, digits and dashes only" $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "operator.anyName" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 47 | trimSuffix "-" -}}
{{- else if hasPrefix (printf "%s-" .Release.Name) .Chart.Name -}}
{{- .Chart.Name -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 47 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* What never changes in the life of a release: a Deployment's selector cannot. */ -}}
{{- define "operator.selector" -}}
app.kubernetes.io/name: dsv4-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- /* Never app.kubernetes.io/managed-by=dsv4-operator, which marks what the operator made. */ -}}
{{- define "operator.labels" -}}
{{ include "operator.selector" . }}
app.kubernetes.io/part-of: dsv4
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end -}}

{{- define "operator.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "operator.name" .) -}}
{{- else -}}
{{- required "serviceAccount.name: name the ServiceAccount to use, since serviceAccount.create is false; the operator's rights are bound to it" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "operator.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{- printf "%s@%s" .repository .digest -}}
{{- else -}}
{{- printf "%s:%s" .repository (.tag | default $.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "operator.webhookSecret" -}}
{{- .Values.webhook.certSecret | default (printf "%s-webhook" (include "operator.name" .)) -}}
{{- end -}}

{{- /* Whether to render an object of the Prometheus Operator: (list $ kind value settings). Empty means no. */ -}}
{{- define "operator.monitoring" -}}
{{- $kind := index . 1 -}}
{{- $value := index . 2 -}}
{{- with index . 3 -}}
{{- if .enabled -}}
{{- if (index $ 0).Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" $kind) -}}
true
{{- else if eq .renderMode "failIfMissing" -}}
{{- fail (printf "metrics.%s.enabled: this cluster has no %s; install the Prometheus Operator first, or set metrics.%s.renderMode to skipIfMissing" $value $kind $value) -}}
{{- else if eq .renderMode "alwaysRender" -}}
true
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
