import type { ComponentChildren } from "preact";

/**
 * Shows a table that scrolls sideways if it is too wide.
 *
 * label: Its name for screen readers. columns: Titles; a title that starts with # is of a column of numbers.
 * look: Further classes of the table. isTall: Whether it scrolls downwards too. children: The rows.
 */
export function Table({
  label,
  columns,
  look = "",
  isTall = false,
  children,
}: {
  label: string;
  columns: string[];
  look?: string;
  isTall?: boolean;
  children: ComponentChildren;
}) {
  return (
    <div class={isTall ? "table-frame table-tall" : "table-frame"} tabIndex={0} role="region" aria-label={label}>
      <table class={`table ${look}`.trim()}>
        <thead>
          <tr>
            {columns.map((column) => (
              <th scope="col" class={isNumber(column) ? "number" : undefined}>
                {column.replace(/^#/, "")}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </div>
  );
}

/** Tells whether a column has numbers, by its title. */
export function isNumber(column: string): boolean {
  return column.startsWith("#");
}
