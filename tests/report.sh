#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The HTML report in a browser: report.sh RAFTER. Status 77 (skipped) without Python or Chromium.
set -euo pipefail
command -v python3 >/dev/null || exit 77
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
RAFTER_PYTHON=/nonexistent/python3 "$1" bench act cross_entropy lce --x 64,128,256 --metric all --percent --error --seconds 0.001 \
    --html "$folder/report.html" --json "$folder/report.json" >/dev/null
python3 "$(dirname "${BASH_SOURCE[0]}")/report_browser.py" "$folder/report.html" "$folder/report.json"
# two runs compared
"$1" compare "$folder/report.json" "$folder/report.json" --html "$folder/compare.html" >/dev/null
python3 "$(dirname "${BASH_SOURCE[0]}")/report_browser.py" "$folder/compare.html" "$folder/report.json"
# the map: heat maps instead of plots
RAFTER_PYTHON=/nonexistent/python3 "$1" bench --preset map --cells 12 --seconds 0.001 --html "$folder/map.html" --json "$folder/map.json" >/dev/null
python3 "$(dirname "${BASH_SOURCE[0]}")/report_browser.py" "$folder/map.html" "$folder/map.json"
