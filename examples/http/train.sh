#!/usr/bin/env bash
# Trains a network with a sign activation through HTTP, with curl and jq only. It learns exclusive or: whether the two
# coordinates of a point have the same sign. The true gradient of Sign is zero, so nothing could be learned with it; the
# rule `ste_sign` passes the gradient on where the input is between -1 and 1.
#
#   gradrule serve --for development --http-port 8480
#   examples/http/train.sh [http://localhost:8480]
set -euo pipefail
url="${1:-http://localhost:8480}"
folder="$(cd "$(dirname "$0")" && pwd)"
steps="${STEPS:-120}"

# post PATH: sends the JSON on standard input, prints the answer; a problem ends the script.
post() {
  curl --silent --show-error --fail-with-body --header 'Content-Type: application/json' \
    ${GRADRULE_TOKEN:+--header "Authorization: Bearer $GRADRULE_TOKEN"} --data-binary @- "$url$1"
}

program="$(post /v1/programs < "$folder/network.json" | jq --raw-output .program.name)"

# 64 points of a grid, and weights that differ from each other.
feeds="$(jq --null-input --compact-output '
  [range(8) as $i | range(8) as $j | [($i - 3.5) / 4, ($j - 3.5) / 4]] as $x
  | {x: $x, target: [$x[] | [if .[0] * .[1] > 0 then 1 else -1 end]],
     w1: [range(2) as $i | [range(16) as $j | (7 * $i + 3 * $j + 1 | sin)]],
     b1: [range(16) as $j | (5 * $j | cos) / 2],
     w2: [range(16) as $j | [(11 * $j + 2 | sin) / 4]],
     b2: [0]}')"

for step in $(seq "$steps"); do
  answer="$(jq --compact-output --arg program "$program" '{$program, feeds: .}' <<< "$feeds" | post /v1/evaluate)"
  # Gradient descent: each weight minus 0.03 times its gradient.
  feeds="$(jq --null-input --compact-output --argjson feeds "$feeds" --argjson answer "$answer" '
    def minus($g): if type == "array" then [., $g] | transpose | map(.[1] as $part | .[0] | minus($part)) else . - 0.03 * $g end;
    reduce ($answer.gradients | to_entries[]) as $g ($feeds; .[$g.key] |= minus($g.value.values))')"
  if [ "$step" = "$steps" ] || [ $((step % 20)) = 1 ]; then
    jq --null-input --raw-output --argjson feeds "$feeds" --argjson answer "$answer" --arg step "$step" '
      [[$answer.outputs.score.values, $feeds.target] | transpose[] | select(.[0][0] * .[1][0] > 0)] | length / 64
      | "step \($step): loss \($answer.outputs.loss.values), accuracy \(.)"'
  fi
done
