import { ServerText } from "./server-text";

/** Shows a description of the server: text between backticks is code, and papers and addresses are links. */
export function Prose({ text }: { text: string }) {
  const pieces = text.split("`");
  return <>{pieces.map((piece, index) => (index % 2 ? <code>{piece}</code> : <Links text={piece} />))}</>;
}

const LINK = /(https?:\/\/[^\s,;)]+|arXiv:\d{4}\.\d{4,5}|doi:10\.[^\s,;]+)/i;

function Links({ text }: { text: string }) {
  return (
    <>
      {text.split(LINK).map((piece, index) =>
        index % 2 ? (
          <a href={address(piece)} target="_blank" rel="noreferrer noopener">
            <ServerText text={piece} />
          </a>
        ) : (
          <ServerText text={piece} />
        ),
      )}
    </>
  );
}

function address(piece: string): string {
  if (/^arxiv:/i.test(piece)) return `https://arxiv.org/abs/${piece.slice(6)}`;
  if (/^doi:/i.test(piece)) return `https://doi.org/${piece.slice(4)}`;
  return piece;
}
