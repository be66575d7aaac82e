import { useState } from "preact/hooks";
import { call } from "../api/client";
import { useLoad } from "../api/load";
import type { Rule } from "../api/types";
import { go, href } from "../router";
import { CodeBlock, CopyMenu } from "../ui/copy";
import { DeleteButton } from "../ui/confirm";
import { Prose } from "../ui/prose";
import { ServerText } from "../ui/server-text";
import { Empty, ErrorBox, Loading } from "../ui/states";
import { copyItems } from "./gallery";
import { NumberField } from "./number-field";
import { playgroundLink } from "./playground-state";
import { defaultText, FAMILIES, formulaOf, ruleName, snippetsOf } from "./rule-text";
import type { Target } from "./sampling";
import { NoSetupError, setupOfRule } from "./setups";
import { CheckCard, CurveCard, SpecialCard, useStudy } from "./study";
import { exampleParams } from "./thumbnail";

const KINDS: Record<string, string> = {
  RULE_KIND_USER: "own rule",
  RULE_KIND_BUILTIN: "built-in rule",
  RULE_KIND_OP: "gradient of a TensorFlow op",
};

/** Page of one rule. */
export function RulePage({ name }: { name: string }) {
  const path = `v1/rules/${encodeURIComponent(name)}`;
  const { answer, error, reload } = useLoad((signal) => call<{ rule: Rule }>("GET", path, { signal }), [name]);
  return (
    <>
      <nav aria-label="Breadcrumb" class="small">
        <a href={href("rules")}>Rules</a>
      </nav>
      {error !== undefined ? (
        <>
          <h1>{name}</h1>
          <ErrorBox error={error} retry={reload} />
        </>
      ) : answer ? (
        <Details key={answer.rule.digest ?? name} rule={answer.rule} asked={name} />
      ) : (
        <>
          <h1>{name}</h1>
          <Loading what="the rule" lines={9} />
        </>
      )}
    </>
  );
}

function Details({ rule, asked }: { rule: Rule; asked: string }) {
  const name = ruleName(rule);
  const { target, reason } = targetOf(rule, asked);
  const [params, setParams] = useState(target?.params ?? {});
  const [others, setOthers] = useState(target?.setup.others ?? []);
  const state = useStudy(
    target && { ...target, params, setup: { ...target.setup, others } },
    rule.perSample,
    JSON.stringify([asked, Object.entries(params).map(([key, value]) => [key, String(value)]), others.map(String)]),
  );
  const snippets = snippetsOf(rule);
  return (
    <>
      <div class="page-head">
        <div>
          <h1>
            <code>{name}</code>
          </h1>
          <p class="row">
            <span class="muted">{KINDS[rule.kind ?? ""]}</span>
            {rule.family && <span class="tag">{FAMILIES[rule.family] ?? rule.family}</span>}
            {rule.trueGradient && <span class="tag tag-good">true gradient</span>}
            {rule.hidesBuiltin && (
              <span class="tag tag-warn">
                hides <a href={href("rules", `builtin/${name}`)}>builtin/{name}</a>
              </span>
            )}
          </p>
        </div>
        <div class="row">
          <CopyMenu name={name} items={copyItems(rule)} />
          <a class="button" href={playgroundLink(rule)}>
            Open in playground
          </a>
          {rule.kind === "RULE_KIND_USER" && (
            <DeleteButton
              what={`rule ${name}`}
              remove={async () => {
                await call("DELETE", `v1/rules/${encodeURIComponent(asked)}`);
                go(href("rules"));
              }}
            >
              Programs that were compiled with it still use it.
            </DeleteButton>
          )}
        </div>
      </div>
      {rule.description && (
        <p class="prose">
          <Prose text={rule.description} />
        </p>
      )}
      {(rule.formula || rule.definition?.expression) && <CodeBlock code={formulaOf(rule)} label="formula" />}
      <div class="columns">
        <div class="stack">
          {target ? (
            <>
              <CurveCard state={state} />
              <SpecialCard state={state} />
            </>
          ) : (
            <Empty title="No curve">The rule is no function of one number: {reason}.</Empty>
          )}
        </div>
        <div class="stack">
          {!!rule.definition?.params?.length && (
            <Params
              rule={rule}
              values={params}
              onChange={(param, value) => setParams((before) => ({ ...before, [param]: value }))}
            />
          )}
          {others.length > 0 && (
            <section class="card stack" aria-labelledby="inputs-title">
              <h2 id="inputs-title">Further inputs</h2>
              {others.map((value, index) => (
                <div class="param">
                  <code>x{index + 1}</code>
                  <NumberField
                    label={`x${index + 1}`}
                    hidden
                    value={value}
                    onChange={(next) => setOthers((before) => before.map((other, at) => (at === index ? next : other)))}
                  />
                </div>
              ))}
            </section>
          )}
          {target && (
            <CheckCard
              state={state}
              isTrueGradient={rule.trueGradient}
              noOp="The rule names no op with one number as its input. Open it in the playground and choose one."
            />
          )}
          <Facts rule={rule} />
          <section class="card stack" aria-labelledby="use-title">
            <h2 id="use-title">Use it</h2>
            <h3>Python</h3>
            <CodeBlock code={snippets.python} label="Python override" />
            <h3>JSON</h3>
            <CodeBlock code={snippets.json} label="JSON override" />
          </section>
        </div>
      </div>
    </>
  );
}

function Params({
  rule,
  values,
  onChange,
}: {
  rule: Rule;
  values: Record<string, number>;
  onChange: (name: string, value: number) => void;
}) {
  return (
    <section class="card stack" aria-labelledby="params-title">
      <h2 id="params-title">Params</h2>
      {(rule.definition?.params ?? []).map((param) => (
        <div class="param">
          <div>
            <code>{param.name}</code>
            <p class="small muted">
              {param.description && (
                <>
                  <Prose text={param.description} />
                  {". "}
                </>
              )}
              {param.defaultValue === undefined ? "Required" : `Default ${defaultText(param)}`}
              {param.range && (
                <>
                  , <ServerText text={param.range} />
                </>
              )}
            </p>
          </div>
          {Object.hasOwn(values, param.name) && (
            <NumberField
              label={param.name}
              hidden
              value={values[param.name]!}
              onChange={(value) => onChange(param.name, value)}
            />
          )}
        </div>
      ))}
    </section>
  );
}

function Facts({ rule }: { rule: Rule }) {
  const facts: [string, preact.ComponentChildren][] = [
    ["For", <ServerText text={rule.opTypes?.join(", ") || "any op"} />],
    ["Source", rule.reference ? <Prose text={rule.reference} /> : undefined],
    ["Aliases", rule.aliases?.length ? <ServerText text={rule.aliases.join(", ")} /> : undefined],
    [
      "Per sample",
      rule.perSample === undefined
        ? undefined
        : rule.perSample
          ? "yes: examples are independent"
          : "no: examples depend on each other",
    ],
    ["Created", rule.createTime ? new Date(rule.createTime).toLocaleString() : undefined],
    ["Digest", rule.digest && <code class="small">{rule.digest}</code>],
  ];
  return (
    <section class="card stack" aria-labelledby="facts-title">
      <h2 id="facts-title">About</h2>
      <dl class="facts">
        {facts.map(
          ([name, value]) =>
            value && (
              <>
                <dt>{name}</dt>
                <dd>{value}</dd>
              </>
            ),
        )}
      </dl>
    </section>
  );
}

function targetOf(rule: Rule, asked: string): { target?: Target; reason?: string } {
  try {
    return { target: { source: { name: asked }, setup: setupOfRule(rule), params: exampleParams(rule) } };
  } catch (error) {
    if (error instanceof NoSetupError) return { reason: error.message };
    throw error;
  }
}
