/**
 * Shows text of the server within a sentence of the page.
 *
 * Characters that change the direction of writing, as in a description in Arabic, then end with the text.
 */
export function ServerText({ text }: { text: string | undefined }) {
  return <bdi>{text}</bdi>;
}
