import type { ComponentChildren } from "preact";
import { call } from "../api/client";
import { useLoad } from "../api/load";
import type { Program, Resolution, TensorSpec } from "../api/types";
import { go, href } from "../router";
import { DeleteButton } from "../ui/confirm";
import { CopyButton } from "../ui/copy";
import { ServerText } from "../ui/server-text";
import { ErrorBox, Loading } from "../ui/states";
import { Table } from "../ui/table";
import { dtypeText, shapeText, timeText } from "./specs";

/** Number of rows after which a table waits for a click. */
const MANY = 50;

/** Page of one stored program. */
export function ProgramPage({ id }: { id: string }) {
  const path = `v1/programs/${encodeURIComponent(id)}`;
  const { answer, error, reload } = useLoad((signal) => call<{ program: Program }>("GET", path, { signal }), [id]);
  const program = answer?.program;
  return (
    <>
      <nav aria-label="Breadcrumb" class="small">
        <a href={href("programs")}>Programs</a>
      </nav>
      <div class="page-head">
        <div class="row">
          <h1>
            <code>{id}</code>
          </h1>
          <CopyButton text={id} label="Copy the program’s ID" />
        </div>
        {program && (
          <div class="row">
            <a class="button button-primary" href={`#/graphs?${new URLSearchParams({ program: id })}`}>
              Run
            </a>
            <DeleteButton
              what={`program ${id}`}
              remove={async () => {
                await call("DELETE", path);
                go(href("programs"));
              }}
            >
              Calls that name it then fail. This cannot be undone.
            </DeleteButton>
          </div>
        )}
      </div>
      {error !== undefined && <ErrorBox error={error} retry={reload} />}
      {!program && error === undefined && <Loading what="the program" lines={9} />}
      {program && <Details program={program} />}
    </>
  );
}

function Details({ program }: { program: Program }) {
  return (
    <div class="columns">
      <div class="stack">
        <Specs title="Inputs" specs={program.inputs} />
        <Specs title="Outputs" specs={program.outputs} />
        <Specs title="Tensors to differentiate (ys)" specs={program.ys} />
        <Specs title="With respect to (xs)" specs={program.xs} sparse={program.sparseGradients} />
      </div>
      <div class="stack">
        <section class="card stack" aria-labelledby="about-title">
          <h2 id="about-title">About</h2>
          <dl class="facts">
            <Fact name="Created">{timeText(program.createTime)}</Fact>
            <Fact name="Device">{program.device}</Fact>
            <Fact name="Program digest">{program.digests?.program && <Digest text={program.digests.program} />}</Fact>
            <Fact name="Graph digest">{program.digests?.graph && <Digest text={program.digests.graph} />}</Fact>
            <Fact name="Random">{program.drawsRandom && "Calls with equal feeds give different outputs."}</Fact>
            {Object.entries(program.aliases ?? {}).map(([alias, tensor]) => (
              <Fact
                name={
                  <>
                    Alias <ServerText text={alias} />
                  </>
                }
              >
                <code>{tensor}</code>
              </Fact>
            ))}
          </dl>
        </section>
        <Overrides overrides={program.overrides ?? []} />
        <Nodes title="Nodes with the default gradient" nodes={program.defaultGradientNodes} />
        <Nodes title="Nodes that rewrites replaced" nodes={program.rewritten} />
      </div>
    </div>
  );
}

function Fact({ name, children }: { name: ComponentChildren; children: ComponentChildren }) {
  if (!children) return null;
  return (
    <>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </>
  );
}

function Digest({ text }: { text: string }) {
  return <code class="small">{text}</code>;
}

function Specs({
  title,
  specs,
  sparse = [],
}: {
  title: string;
  specs?: TensorSpec[] | undefined;
  sparse?: string[] | undefined;
}) {
  if (!specs?.length) return null;
  return (
    <section class="stack" aria-label={title}>
      <h2>{title}</h2>
      <Table label={`Table of ${title}`} columns={["Name", "Type", "Shape"]} look="table-fixed">
        {specs.map((spec) => (
          <tr key={spec.name}>
            <th scope="row">
              <code>{spec.name}</code> {sparse.includes(spec.name ?? "") && <span class="tag">sparse gradient</span>}
            </th>
            <td>{dtypeText(spec.dtype)}</td>
            <td class="number-left">{shapeText(spec.shape)}</td>
          </tr>
        ))}
      </Table>
    </section>
  );
}

function Overrides({ overrides }: { overrides: Resolution[] }) {
  return (
    <section class="stack" aria-label="Overrides">
      <h2>
        Overrides <span class="muted number">{overrides.length}</span>
      </h2>
      {overrides.length === 0 ? (
        <p class="muted">No override matched a node: all gradients are the ops’ own.</p>
      ) : (
        <Table label="Table of overrides" columns={["Node", "Op", "Rule", "Effect"]} isTall>
          {overrides.map((row) => (
            <tr>
              <th scope="row">
                <code>{row.qualifiedName || row.node}</code>
              </th>
              <td>{row.opType}</td>
              <td>
                {LINKLESS.has(row.rule ?? "") ? row.rule : <a href={href("rules", row.rule ?? "")}>{row.rule}</a>}
              </td>
              <td>{STATUS[row.status ?? ""]}</td>
            </tr>
          ))}
        </Table>
      )}
    </section>
  );
}

const STATUS: Readonly<Record<string, ComponentChildren>> = {
  RESOLUTION_STATUS_ACTIVE: <span class="tag tag-good">active</span>,
  RESOLUTION_STATUS_OFF_PATH: <span class="tag">off the path</span>,
  RESOLUTION_STATUS_NOT_DIFFERENTIABLE: <span class="tag">not differentiable</span>,
};

/** Words of Resolution.rule that are no names of rules. */
const LINKLESS = new Set(["default", "inline", "pass", "zero", ""]);

function Nodes({ title, nodes }: { title: string; nodes?: string[] | undefined }) {
  if (!nodes?.length) return null;
  return (
    <details class="card" open={nodes.length <= MANY}>
      <summary>
        {title} <span class="muted number">{nodes.length}</span>
      </summary>
      <ul class="nodes">
        {nodes.map((node) => (
          <li>
            <code>{node}</code>
          </li>
        ))}
      </ul>
    </details>
  );
}
