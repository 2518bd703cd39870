{{- define "amdvgpud.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 63 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "amdvgpud.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "amdvgpud.labels" -}}
{{ include "amdvgpud.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "amdvgpud.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "amdvgpud.name" .) }}
{{- end }}

{{- define "amdvgpud.image" -}}
{{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
{{- end }}

{{- define "amdvgpud.ownDevicesSelector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}-own-devices
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
