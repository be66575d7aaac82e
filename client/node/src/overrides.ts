// Overrides as a caller writes them, and their messages.

import type { MessageInitShape } from "@bufbuild/protobuf";

import type { OverrideSchema } from "./gen/gradrule/v1/override_pb.js";
import { definitionMessage, paramValues } from "./rules.js";
import type { Params, RuleSource } from "./rules.js";

/** A rule by its name, or one that is registered nowhere. */
export type RuleRef = string | RuleSource;

/** A rule, or a rule with its params. */
export type RuleChoice = RuleRef | readonly [RuleRef, Params];

/** Nodes with the rule that they get. What is given of `opType`, `node` and `scope` must all hold. */
export interface Override {
  readonly rule: RuleRef;
  readonly opType?: string;
  /** Exact name, or a glob: `*` and `?` stay between slashes, `**` crosses them. */
  readonly node?: string;
  readonly scope?: string;
  readonly params?: Params;
  /** By which a call gives params. Default: op type, else node, else scope. */
  readonly label?: string;
  /** True: no error where no node on the path matches. */
  readonly optional?: boolean;
}

/** Rules by op type, or an ordered list in which the first match decides. */
export type Overrides = Readonly<Record<string, RuleChoice>> | readonly Override[];

/** The rule and the params of a choice. */
export function ruleAndParams(choice: RuleChoice): readonly [RuleRef, Params] {
  return isPair(choice) ? choice : [choice, {}];
}

/** The messages of overrides, in order. */
export function overrideMessages(overrides: Overrides): MessageInitShape<typeof OverrideSchema>[] {
  if (isList(overrides)) return overrides.map(overrideMessage);
  return Object.entries(overrides).map(([opType, choice]) => {
    const [rule, params] = ruleAndParams(choice);
    return overrideMessage({ rule, opType, params });
  });
}

function isPair(choice: RuleChoice): choice is readonly [RuleRef, Params] {
  return Array.isArray(choice);
}

function isList(overrides: Overrides): overrides is readonly Override[] {
  return Array.isArray(overrides);
}

function overrideMessage(override: Override): MessageInitShape<typeof OverrideSchema> {
  const { rule, opType, node, scope, params = {}, label, optional } = override;
  const choice =
    typeof rule === "string"
      ? { case: "rule" as const, value: rule }
      : { case: "definition" as const, value: definitionMessage(rule, Object.keys(params)) };
  return {
    selector: { opType: opType ?? "", node: node ?? "", scope: scope ?? "" },
    choice,
    params: paramValues(params),
    label: label ?? "",
    optional: optional ?? false,
  };
}
