{{- define "kvfs.labels" -}}
app.kubernetes.io/name: kvfs
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvfs.common" -}}
{{ include "kvfs.labels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "kvfs.secret" -}}
{{ .Values.cluster.existingSecret | default (printf "%s-cluster" .Release.Name) }}
{{- end }}

{{- define "kvfs.passwordSecret" -}}
{{- if .Values.engine.url }}{{ .Values.engine.passwordSecret }}{{ else }}{{ .Release.Name }}-engine{{ end }}
{{- end }}

{{- define "kvfs.engine" -}}
{{- $url := .Values.engine.url | default (printf "redis://%s-engine:6379/0" .Release.Name) }}
{{- if include "kvfs.passwordSecret" . }}
{{- $mark := ternary "&" "?" (contains "?" $url) }}
{{- printf "%s%spassword-file=/etc/kvfs-engine/password" $url $mark }}
{{- else }}
{{- $url }}
{{- end }}
{{- end }}
